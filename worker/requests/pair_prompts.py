"""Writes a query and a document into one prompt, for models that were trained on a template of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import takewhile
from typing import NamedTuple

from engine.checkpoint.classifier_config import PairForm
from engine.errors import CheckpointError, InvalidRequest
from engine.text.chat_template import ChatTemplate
from engine.text.inputs import EncodedInput, TextPair, no_room
from engine.text.tokenizer import Tokenizer

QUERY, DOCUMENT = "query", "document"  # sentence-transformers' roles, and vLLM's
_ANY_TIME = datetime.fromtimestamp(0, UTC)  # no template that reads the date is taken
_SHORT, _LONG = "0", "1 2 3 4"  # sentence-transformers': their tokens differ, those behind them do not


class PairPrompt(NamedTuple):
    """A query and a document in the words of the model's template."""

    text: str


class PairPrompts:
    """Makes inputs of pairs as one model reads them: by its template, joined, or as the tokenizer puts two together."""

    def __init__(self, form: PairForm, tokenizer: Tokenizer) -> None:
        """Raises CheckpointError where pairs are to go through a template, and the model has none that shows both."""
        self._form, self._tokenizer = form, tokenizer
        self._kind = form.kind
        self._template: ChatTemplate | None = None
        self._num_behind = 0
        if form.kind == "template or joined":
            self._kind = "template" if _names_roles(tokenizer.chat_template) else "joined"
        if self._kind == "template":
            self._template = _checked(tokenizer.chat_template)
            self._check_shows_both()
            short, long = self._token_ids([self.prompt((text, text), "") for text in (_SHORT, _LONG)])
            equal = takewhile(lambda pair: pair[0] == pair[1], zip(reversed(short), reversed(long), strict=False))
            self._num_behind = len(list(equal))

    def input_of(self, pair: TextPair, param: str) -> str | TextPair | PairPrompt:
        """What is tokenised of a pair. Raises InvalidRequest naming `param` where the template refuses it."""
        if self._kind == "template":
            return self.prompt(pair, param)
        return "".join(pair) if self._kind == "joined" else pair

    def prompt(self, pair: TextPair, param: str) -> PairPrompt:
        """The pair in the template's words. Raises InvalidRequest naming `param`."""
        form, template = self._form, self._template
        if template is None:
            raise ValueError("pairs go through no template here")
        given = [] if form.instruction is None else [("system", form.instruction)]
        messages = [
            {"role": role, "content": [{"type": "text", "text": text}] if form.takes_parts else text}
            for role, text in (*given, *zip((QUERY, DOCUMENT), pair, strict=True))
        ]
        arguments: dict[str, object] = {"add_generation_prompt": False, **form.arguments}
        prompts = bool(arguments.pop("add_generation_prompt"))
        try:
            return PairPrompt(
                template.render(messages, _ANY_TIME, tools=None, add_generation_prompt=prompts, **arguments)
            )
        except InvalidRequest as error:
            raise InvalidRequest(f"{param}: {error}", param=param, code=error.code) from error

    def encode(self, prompts: Sequence[tuple[PairPrompt, int | None]]) -> list[EncodedInput | InvalidRequest]:
        """The tokens of each prompt, cut to its limit: what the template writes behind the document stays, as
        sentence-transformers has it, since the score is read off the last token. The tokenizer adds none of its own.
        """
        encoded = self._token_ids([prompt for prompt, _ in prompts])
        return [self._cut(ids, limit) for ids, (_, limit) in zip(encoded, prompts, strict=True)]

    def _cut(self, token_ids: list[int], limit: int | None) -> EncodedInput | InvalidRequest:
        if limit is not None and len(token_ids) > limit:
            room = limit - self._num_behind
            if room <= 0:
                return no_room(limit, f"the {self._num_behind} tokens that the template writes behind the document")
            if self._tokenizer.truncation_side == "left":
                token_ids = token_ids[-limit:]
            else:
                token_ids = token_ids[:room] + token_ids[len(token_ids) - self._num_behind :]
        return EncodedInput(token_ids, len(token_ids))

    def _token_ids(self, prompts: Sequence[PairPrompt]) -> list[list[int]]:
        return self._tokenizer.encode_batch([prompt.text for prompt in prompts], add_special_tokens=False)

    def _check_shows_both(self) -> None:
        """As sentence-transformers tries it: a prompt that does not change with a text does not show it."""
        try:
            shown, *others = [self.prompt(pair, "").text for pair in (("a", "a"), ("b", "a"), ("a", "b"))]
        except InvalidRequest as error:
            raise _refuse(f"fails on them{error}") from error
        hidden = [role for role, other in zip((QUERY, DOCUMENT), others, strict=True) if other == shown]
        if hidden:
            raise _refuse(f"does not show the {' and the '.join(hidden)}")


def _checked(template: ChatTemplate | None) -> ChatTemplate:
    if template is None:
        raise _refuse("is missing")
    if template.reads("strftime_now", with_tools=False):
        raise _refuse("writes the date, so that a score would be another one every day")
    return template


def _names_roles(template: ChatTemplate | None) -> bool:
    return template is not None and all(template.knows_role(role, with_tools=False) for role in (QUERY, DOCUMENT))


def _refuse(why: str) -> CheckpointError:
    accepted = f"a chat_template.jinja that shows messages of the roles {QUERY} and {DOCUMENT}"
    return CheckpointError(f"this model scores pairs by its chat template, which {why}; accepted: {accepted}")
