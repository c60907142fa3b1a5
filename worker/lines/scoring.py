"""Checks the bodies of /v1/score, /v1/rerank and /classify, whose fields are vLLM's."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, ClassVar, Self

from pydantic import BeforeValidator, model_validator
from pydantic_core import PydanticCustomError

from worker.lines.bodies import InputBody, PooledBody
from worker.lines.fields import AT_LEAST_NONE

_TEXTS = "a string or a list of strings"
TextPair = tuple[str, str]
Side = tuple[str, tuple[str, ...]]  # a field's name and its texts


def _texts(value: object) -> tuple[str, ...]:
    """One text or several as a tuple. A text may be empty: a model reads a pair of one, and vLLM scores it."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", _TEXTS)
    if not value:
        raise PydanticCustomError("empty_prompt", "at least one text")
    for position, item in enumerate(value):
        if not isinstance(item, str):
            raise PydanticCustomError("invalid_type", "a string", {"at": position})
    return tuple(value)


Texts = Annotated[tuple[str, ...], BeforeValidator(_texts)]


class PairBody(PooledBody):
    """Texts to be held against other texts: what a score and a reranking have in common."""

    use_activation: bool = True  # false: a head's logit, as it is; of no effect on the cosine of two embeddings

    @property
    @abstractmethod
    def sides(self) -> tuple[Side, Side]:
        """The two fields with their texts: the first has one text, or as many as the second."""

    @property
    def pairs(self) -> list[TextPair]:
        """What is scored: as many as the second field has texts."""
        (_, first), (_, second) = self.sides
        return list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))

    @property
    def num_characters(self) -> int:
        """Of all pairs: a text alone in the first field counts once for each of the second."""
        (_, first), (_, second) = self.sides
        repeats = len(second) if len(first) == 1 else 1
        return repeats * sum(map(len, first)) + sum(map(len, second))

    def param_of(self, index: int) -> str:
        """What error messages call a pair: its second text."""
        name, texts = self.sides[1]
        return name if len(texts) == 1 else f"{name}[{index}]"

    def text_param_of(self, index: int) -> str:
        """What they call a text, counted through the first field and then the second."""
        for name, texts in self.sides:
            if index < len(texts):
                return name if len(texts) == 1 else f"{name}[{index}]"
            index -= len(texts)
        raise IndexError(index)


class ScoreBody(PairBody):
    """Pairs of texts: one against each of several, or several one by one. Each becomes a score."""

    text_1: Texts = ()
    text_2: Texts = ()
    queries: Texts = ()
    documents: Texts = ()
    items: Texts = ()
    data_1: Texts = ()
    data_2: Texts = ()

    # vLLM's names for the two sides; it takes the first of these that fits.
    forms: ClassVar[tuple[tuple[str, str], ...]] = (
        ("text_1", "text_2"),
        ("queries", "documents"),
        ("queries", "items"),
        ("data_1", "data_2"),
    )

    @model_validator(mode="after")
    def _has_two_sides(self) -> Self:
        given = self.model_fields_set & {name for form in self.forms for name in form}
        form = next((form for form in self.forms if given == set(form)), None)
        if form is None:
            at, *others = [name for name in type(self).model_fields if name in given] or ["text_1"]
            alone = "given alone" if given else "missing"
            said = f"given with {' and '.join(others)}" if others else alone
            accepted = ", or ".join(" and ".join(form) for form in self.forms)
            raise PydanticCustomError("invalid_value", "{accepted}", {"accepted": accepted, "at": at, "value": said})
        first, second = (len(getattr(self, name)) for name in form)
        if first not in (1, second):
            accepted = f"one text, or as many as {form[1]} has ({second})"
            context = {"accepted": accepted, "at": form[0], "value": f"{first} texts"}
            raise PydanticCustomError("invalid_value", "{accepted}", context)
        return self

    @property
    def sides(self) -> tuple[Side, Side]:
        """See PairBody."""
        first, second = next(form for form in self.forms if self.model_fields_set.issuperset(form))
        return (first, getattr(self, first)), (second, getattr(self, second))


class RerankBody(PairBody):
    """A query and documents, which come back in the order of how well they go with it."""

    query: str
    documents: Texts
    top_n: Annotated[int, AT_LEAST_NONE] = 0  # documents that come back; 0: all

    @property
    def sides(self) -> tuple[Side, Side]:
        """See PairBody."""
        return ("query", (self.query,)), ("documents", self.documents)


class ClassifyBody(InputBody):
    """Inputs, each of which is given a class."""

    use_activation: bool = True  # false: logits instead of probabilities
