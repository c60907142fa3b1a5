"""Builds the record of a request that ran: an OpenAI Batch result line with status 200.

Log-probabilities have one entry for each generated token, the ending token included, and one for each token of an
echoed prompt.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.request import Completion, RequestOutput, TokenLogprobs
from engine.text.tokenizer import Tokenizer
from worker.lines.bodies import EmbeddingBody
from worker.lines.chat import ChatBody
from worker.lines.request_line import GeneratingBody, RequestLine
from worker.lines.responses import ResponsesChat
from worker.lines.scoring import ClassifyBody, PairBody
from worker.records.answers import ChatAnswer, call_id
from worker.records.record import RecordContext
from worker.records.responses import responses_record
from worker.records.scores import scores_record

LOWEST_LOGPROB = -9999.0  # OpenAI's and vLLM's stand-in for minus infinity, which JSON cannot write


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt's text and, where log-probabilities were asked for, its tokens: three sequences of one length."""

    text: str
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()  # where each token begins in the text, in characters
    entries: Sequence[TokenLogprobs | None] = ()  # None: the first token, which nothing predicts


def success_record(
    line: RequestLine,
    output: RequestOutput,
    tokenizer: Tokenizer,
    context: RecordContext,
    answers: Sequence[ChatAnswer],
    echo: EchoedPrompt | None = None,
) -> dict[str, object]:
    """The result line of `line`: a `chat.completion`, a `text_completion`, a `response` or a list of embeddings, as
    OpenAI has them, or what vLLM has of scores, rerankings and classes.

    `answers`: one for each completion of a chat, none for other lines. `echo`: the prompt that a text completion asks
    to have back.

    Beyond OpenAI: `stop_reason` in each choice (the stop string or token id that ended it, else null), where
    return_token_ids asks for it `token_ids`: everything generated, the ending token included, where the model
    reasoned `reasoning_content` in the message, as vLLM and DeepSeek name it, and where the line asks for them the
    `choice_logprobs` of a guided choice, one a text.
    """
    if isinstance(line.body, EmbeddingBody):
        return embedding_record(line, line.body, output, context)
    if isinstance(line.body, PairBody | ClassifyBody):
        return scores_record(line, line.body, output, context)
    if isinstance(line.body, ResponsesChat):
        return responses_record(line, line.body, output, context, answers)
    if isinstance(line.body, ChatBody):
        completion_id, kind = f"chatcmpl-{context.job_id}-{line.index}", "chat.completion"
        said = [_chat_answer(*pair, completion_id, tokenizer) for pair in zip(output.completions, answers, strict=True)]
    else:
        completion_id, kind = f"cmpl-{context.job_id}-{line.index}", "text_completion"
        said = [_text_answer(completion, tokenizer, echo) for completion in output.completions]
    body: dict[str, object] = {
        "id": completion_id,
        "object": kind,
        "created": context.created_s,
        "model": context.model_name,
        "choices": [_choice(line.body, *pair) for pair in zip(output.completions, said, strict=True)],
        "usage": _usage(output, answers),
    }
    if line.body.choice_logprobs:
        totals = map(_finite, output.continuation_logprobs or ())
        body["choice_logprobs"] = dict(zip(line.body.scored_choices, totals, strict=True))
    return context.answered(line.index, line.custom_id, 200, body)


def _chat_answer(
    completion: Completion, answer: ChatAnswer, completion_id: str, tokenizer: Tokenizer
) -> dict[str, object]:
    """The fields that only a chat's choice has."""
    reason = completion.finish_reason.value
    return {
        "message": answer_message(answer, completion_id, completion.index),
        "logprobs": None if completion.logprobs is None else chat_logprobs(completion.logprobs, tokenizer),
        "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,  # a cut answer says so
    }


def _text_answer(completion: Completion, tokenizer: Tokenizer, echo: EchoedPrompt | None) -> dict[str, object]:
    return {
        "text": completion.text if echo is None else echo.text + completion.text,
        "logprobs": None if completion.logprobs is None else text_logprobs(completion, tokenizer, echo),
        "finish_reason": completion.finish_reason.value,
    }


def _choice(body: GeneratingBody, completion: Completion, said: Mapping[str, object]) -> dict[str, object]:
    choice: dict[str, object] = {"index": completion.index, **said, "stop_reason": completion.stop_reason}
    if body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def _usage(output: RequestOutput, answers: Sequence[ChatAnswer]) -> dict[str, object]:
    completion_tokens = sum(len(completion.token_ids) for completion in output.completions)
    usage: dict[str, object] = {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": output.num_prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
    reasoning = [answer.num_reasoning_tokens for answer in answers if answer.num_reasoning_tokens is not None]
    if reasoning:
        usage["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
    return usage


def embedding_record(
    line: RequestLine, body: EmbeddingBody, output: RequestOutput, context: RecordContext
) -> dict[str, object]:
    """The result line of `line`: OpenAI's list of embeddings. Numbers stay an array, which `encode_record` writes."""
    in_base64 = body.encoding_format == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(embedding) if in_base64 else embedding}
        for index, embedding in enumerate(output.embeddings)
    ]
    response = {
        "object": "list",
        "data": data,
        "model": context.model_name,
        "usage": {"prompt_tokens": output.num_prompt_tokens, "total_tokens": output.num_prompt_tokens},
    }
    return context.answered(line.index, line.custom_id, 200, response)


def _base64(embedding: array[float]) -> str:
    """The float32 numbers in little-endian order, as OpenAI and its clients have them."""
    if sys.byteorder == "big":
        embedding = embedding[:]
        embedding.byteswap()
    return base64.b64encode(embedding.tobytes()).decode("ascii")


def answer_message(answer: ChatAnswer, completion_id: str, choice: int) -> dict[str, object]:
    """`choices[].message` of a chat completion. A call's id follows from where it stands, so it is always the same."""
    message: dict[str, object] = {"role": "assistant", "content": answer.content, "refusal": None}
    if answer.reasoning is not None:
        message["reasoning_content"] = answer.reasoning
    if answer.calls:
        message["tool_calls"] = [
            {
                "id": call_id(f"{completion_id}/{choice}/{number}", is_short=answer.has_short_ids),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.calls)
        ]
    return message


def chat_logprobs(chosen: Sequence[TokenLogprobs], tokenizer: Tokenizer) -> dict[str, object]:
    """`choices[].logprobs` of a chat completion."""
    content = [
        {
            **_chat_token(token.token_id, token.logprob, tokenizer),
            "top_logprobs": [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in token.top],
        }
        for token in chosen
    ]
    return {"content": content, "refusal": None}


def text_logprobs(completion: Completion, tokenizer: Tokenizer, echo: EchoedPrompt | None = None) -> dict[str, object]:
    """`choices[].logprobs` of a text completion, behind those of the prompt where it is echoed.

    `top_logprobs` always holds the token itself too. Two tokens may have the same text; the more likely one keeps the
    key. Of a prompt's first token, which nothing predicts, both are null.
    """
    before, chosen = echo or EchoedPrompt(""), completion.logprobs or ()
    entries = [*before.entries, *chosen]
    own_ids = [token.token_id for token in chosen]
    tokens = [tokenizer.token_text(token_id) for token_id in (*before.token_ids, *own_ids)]
    own_offsets = token_offsets(completion.text, own_ids, tokenizer, goes_on=True)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [_top(*pair, tokenizer) for pair in zip(entries, tokens, strict=True)],
        "text_offset": [*before.offsets, *(len(before.text) + offset for offset in own_offsets)],
    }


def token_offsets(text: str, token_ids: Sequence[int], tokenizer: Tokenizer, *, goes_on: bool = False) -> Iterator[int]:
    """Where each token begins in the text as the tokens spell it, which is the line's own text unless the tokenizer
    normalises it. Tokens of one character begin together; special tokens take room only where the text has them.

    `goes_on`: text stands in front of it, see Tokenizer.new_detokenizer.
    """
    detokenizer = tokenizer.new_detokenizer(goes_on=goes_on)
    end = 0
    for token_id in token_ids:
        yield min(end, len(text))
        if token_id not in tokenizer.special_token_ids:
            end += len(detokenizer.append(token_id))
            continue
        mark = tokenizer.token_text(token_id)
        if text.startswith(mark, end):
            end += len(mark)


def _top(entry: TokenLogprobs | None, text: str, tokenizer: Tokenizer) -> dict[str, float] | None:
    if entry is None:
        return None
    top: dict[str, float] = {}
    for token_id, logprob in entry.top:
        top.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    top.setdefault(text, _finite(entry.logprob))
    return top


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, object]:
    return {
        "token": tokenizer.token_text(token_id),
        "logprob": _finite(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
