"""Prompts on their way back to whom they came from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from engine.request import RequestOutput
from engine.text.tokenizer import Tokenizer
from worker.lines.completion_body import CompletionBody
from worker.records.echoed_prompt import EchoedPrompt


class PromptEchoes:
    """Makes what `echo` asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of(self, body: CompletionBody, output: RequestOutput) -> EchoedPrompt | None:
        """The prompt of `body` with what `output` says of its tokens; None where it is not to be echoed.

        A prompt of token ids is decoded as generated tokens are: without special tokens.
        """
        if not body.echo:
            return None
        text = body.prompt if isinstance(body.prompt, str) else self._tokenizer.decode(body.prompt)
        entries = output.prompt_logprobs
        if entries is None:
            return EchoedPrompt(text)
        return EchoedPrompt(text, entries.token_ids, tuple(self._offsets(text, entries.token_ids)), entries)

    def _offsets(self, text: str, token_ids: Sequence[int]) -> Iterator[int]:
        """Where each token begins in the text as the tokens spell it, which is the line's own text unless the tokenizer
        normalises it. Tokens of one character begin together; special tokens take room only where the text has them.
        """
        detokenizer = self._tokenizer.new_detokenizer()
        end = 0
        for token_id in token_ids:
            yield min(end, len(text))
            if token_id not in self._tokenizer.special_token_ids:
                end += len(detokenizer.append(token_id))
                continue
            mark = self._tokenizer.token_text(token_id)
            if text.startswith(mark, end):
                end += len(mark)
