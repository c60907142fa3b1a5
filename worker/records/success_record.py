"""The record of a request that ran: an OpenAI Batch result line with status 200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from worker.answers.chat_answer import ChatAnswer
from worker.lines.chat_body import ChatBody
from worker.lines.embedding_body import EmbeddingBody
from worker.lines.request_line import GeneratingBody, RequestLine
from worker.records.answer_message import answer_message
from worker.records.echoed_prompt import EchoedPrompt
from worker.records.embedding_record import embedding_record
from worker.records.finished_completion import FinishedCompletion
from worker.records.finished_request import FinishedRequest
from worker.records.logprob_shapes import chat_logprobs, text_logprobs
from worker.records.record_context import RecordContext
from worker.records.token_spelling import TokenSpelling


def success_record(
    line: RequestLine,
    output: FinishedRequest,
    spelling: TokenSpelling,
    context: RecordContext,
    answers: Sequence[ChatAnswer],
    echo: EchoedPrompt | None = None,
) -> dict[str, object]:
    """The result line of `line`: a `chat.completion`, a `text_completion` or a list of embeddings, as OpenAI has them.

    `answers`: what was read out of the completions of a chat, one each; none of another line.
    `echo`: the prompt of a text completion that is to come back with it.

    Beyond OpenAI: `stop_reason` in each choice (the stop string or token id that ended it, else null), where
    return_token_ids asks for it `token_ids`: everything generated, the ending token included, and where the model
    reasoned `reasoning_content` in the message, as vLLM and DeepSeek name it.
    """
    if isinstance(line.body, EmbeddingBody):
        return embedding_record(line, line.body, output, context)
    if isinstance(line.body, ChatBody):
        completion_id, kind = f"chatcmpl-{context.job_id}-{line.index}", "chat.completion"
        said = [_chat_answer(*pair, completion_id, spelling) for pair in zip(output.completions, answers, strict=True)]
    else:
        completion_id, kind = f"cmpl-{context.job_id}-{line.index}", "text_completion"
        said = [_text_answer(completion, spelling, echo) for completion in output.completions]
    body: dict[str, object] = {
        "id": completion_id,
        "object": kind,
        "created": context.created_s,
        "model": context.model_name,
        "choices": [_choice(line.body, *pair) for pair in zip(output.completions, said, strict=True)],
        "usage": _usage(output, answers),
    }
    return context.answered(line.index, line.custom_id, 200, body)


def _chat_answer(
    completion: FinishedCompletion, answer: ChatAnswer, completion_id: str, spelling: TokenSpelling
) -> dict[str, object]:
    """What of a choice is a conversation's."""
    reason = completion.finish_reason.value
    return {
        "message": answer_message(answer, completion_id, completion.index),
        "logprobs": None if completion.logprobs is None else chat_logprobs(completion.logprobs, spelling),
        "finish_reason": "tool_calls" if answer.calls and reason == "stop" else reason,  # one that was cut says so
    }


def _text_answer(
    completion: FinishedCompletion, spelling: TokenSpelling, echo: EchoedPrompt | None
) -> dict[str, object]:
    return {
        "text": completion.text if echo is None else echo.text + completion.text,
        "logprobs": None if completion.logprobs is None else text_logprobs(completion.logprobs, spelling, echo),
        "finish_reason": completion.finish_reason.value,
    }


def _choice(body: GeneratingBody, completion: FinishedCompletion, said: Mapping[str, object]) -> dict[str, object]:
    choice: dict[str, object] = {"index": completion.index, **said, "stop_reason": completion.stop_reason}
    if body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def _usage(output: FinishedRequest, answers: Sequence[ChatAnswer]) -> dict[str, object]:
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
