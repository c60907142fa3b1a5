"""The record of a request that ran: an OpenAI Batch result line with status 200."""

from __future__ import annotations

from worker.lines.chat_body import ChatBody
from worker.lines.request_line import RequestLine
from worker.records.finished_completion import FinishedCompletion
from worker.records.finished_request import FinishedRequest
from worker.records.logprob_shapes import chat_logprobs, text_logprobs
from worker.records.record_context import RecordContext
from worker.records.token_spelling import TokenSpelling


def success_record(
    line: RequestLine, output: FinishedRequest, spelling: TokenSpelling, context: RecordContext
) -> dict[str, object]:
    """The result line of `line`: a `chat.completion` or `text_completion` body, as OpenAI has them.

    Beyond OpenAI: `stop_reason` in each choice (the stop string or token id that ended it, else null) and, where
    return_token_ids asks for it, `token_ids`: everything generated, the ending token included.
    """
    is_chat = isinstance(line.body, ChatBody)
    body: dict[str, object] = {
        "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{context.job_id}-{line.index}",
        "object": "chat.completion" if is_chat else "text_completion",
        "created": context.created_s,
        "model": context.model_name,
        "choices": [_choice(line, completion, spelling) for completion in output.completions],
        "usage": _usage(output),
    }
    return {
        "id": context.record_id(line.index),
        "custom_id": line.custom_id,
        "response": {"status_code": 200, "request_id": context.request_id(line.index), "body": body},
        "error": None,
    }


def _choice(line: RequestLine, completion: FinishedCompletion, spelling: TokenSpelling) -> dict[str, object]:
    choice: dict[str, object] = {"index": completion.index}
    if isinstance(line.body, ChatBody):
        choice["message"] = {"role": "assistant", "content": completion.text, "refusal": None}
        to_shape = chat_logprobs
    else:
        choice["text"] = completion.text
        to_shape = text_logprobs
    logprobs = completion.logprobs
    choice["logprobs"] = None if logprobs is None else to_shape(logprobs, spelling)
    choice["finish_reason"] = completion.finish_reason.value
    choice["stop_reason"] = completion.stop_reason
    if line.body.return_token_ids:
        choice["token_ids"] = list(completion.token_ids)
    return choice


def _usage(output: FinishedRequest) -> dict[str, object]:
    completion_tokens = sum(len(completion.token_ids) for completion in output.completions)
    return {
        "prompt_tokens": output.num_prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": output.num_prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.num_cached_tokens},
    }
