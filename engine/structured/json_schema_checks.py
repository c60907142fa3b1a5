"""What is refused of a JSON schema before it is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

# Their values are data, not schemas.
_DATA = frozenset({"const", "enum", "default", "examples", "required"})


def check_json_schema(schema: object) -> None:
    """Raise ValueError for what the compiler takes and does not hold to.

    It lets keys that only additionalProperties or patternProperties allow be written twice; they count once.
    """
    for node in _objects(schema):
        fewest, required = node.get("minProperties"), node.get("required")
        surely = len(required) if isinstance(required, list) else 0
        if isinstance(fewest, int | float) and fewest > max(1, surely):
            raise ValueError(f"minProperties is {fewest}; accepted: at most 1, or the number of required properties")


def _objects(schema: object) -> Iterator[Mapping[str, object]]:
    """Every object of a schema that may be a schema itself."""
    pending = [schema]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            yield node
            pending += [value for key, value in node.items() if key not in _DATA]
