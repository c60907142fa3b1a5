"""What is refused of a schema before it is compiled, and what of it is a schema at all."""

from __future__ import annotations

import pytest

from engine.structured.grammar import check_json_schema

MANY = {"type": "object", "minProperties": 3}


@pytest.mark.parametrize("name", ["const", "enum", "default", "examples", "required"])
@pytest.mark.parametrize("names", ["properties", "patternProperties", "$defs", "definitions"])
def test_a_schema_is_checked_whatever_its_name(names: str, name: str) -> None:
    with pytest.raises(ValueError, match="minProperties is 3"):
        check_json_schema({"type": "object", names: {name: MANY}})


@pytest.mark.parametrize("key", ["const", "default"])
def test_data_is_not_checked_as_a_schema(key: str) -> None:
    check_json_schema({key: MANY, "properties": {"a": {"enum": [MANY]}, "b": {"properties": {"minProperties": {}}}}})


@pytest.mark.parametrize(
    ("schema", "says"),
    [({"const": "a\x01"}, r"const holds .*U\+0001"), ({"enum": ["b", {"k": ["\x7f"]}]}, r"enum holds .*U\+007F")],
)
def test_a_value_that_cannot_be_written_is_refused(schema: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_json_schema(schema)


def test_a_value_of_what_json_escapes_shortly_is_taken() -> None:
    check_json_schema({"const": '\b\f\n\r\t"\\/\u2028'})


def test_an_object_has_so_many_optional_properties() -> None:
    names = [f"p{i}" for i in range(2001)]
    properties = {name: {"type": "string"} for name in names}
    check_json_schema({"properties": properties, "required": names[:1]})
    with pytest.raises(ValueError, match="properties has 2001 that are not required; accepted: at most 2000"):
        check_json_schema({"properties": properties})
