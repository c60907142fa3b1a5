"""Builds the answer to a line of /v1/responses: a Response object, of the same completion that a chat would have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.request import FinishReason, RequestOutput
from worker.lines.request_line import RequestLine
from worker.lines.responses import ResponsesChat
from worker.records.answers import ChatAnswer, call_id
from worker.records.record import RecordContext

# What the object repeats of the request, and what it says where the request says nothing.
_REPEATED: Mapping[str, object] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "safety_identifier": None,
    "temperature": 1.0,
    "tool_choice": "auto",
    "top_p": 1.0,
    "user": None,
}


def responses_record(
    line: RequestLine, body: ResponsesChat, output: RequestOutput, context: RecordContext, answers: Sequence[ChatAnswer]
) -> dict[str, object]:
    """The result line of `line`: a `response`, as OpenAI's Responses API has it.

    A line has one completion. It is `incomplete` where the answer was cut by max_output_tokens or by the context.
    Nothing is stored, so its id cannot be asked for.
    """
    [completion], [answer] = output.completions, answers
    is_cut = completion.finish_reason is FinishReason.LENGTH
    response_id = f"resp_{context.job_id}-{line.index}"
    response: dict[str, object] = {
        "id": response_id,
        "object": "response",
        "created_at": context.created_s,
        "status": "incomplete" if is_cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": context.model_name,
        "output": _items(answer, response_id, is_cut=is_cut),
        "background": False,
        "previous_response_id": None,
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        **_repeated(body.asked),
        "usage": _usage(output, answer),
    }
    return context.answered(line.index, line.custom_id, 200, response)


def _items(answer: ChatAnswer, response_id: str, *, is_cut: bool) -> list[dict[str, object]]:
    """What the model thought, said and called, in this order; ids follow from where the items stand."""
    number = response_id.removeprefix("resp_")
    items: list[dict[str, object]] = []
    if answer.reasoning is not None:
        text = [{"type": "reasoning_text", "text": answer.reasoning}]
        items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": text})
    if answer.content is not None and (answer.content or not (is_cut and items)):
        said = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        items.append(
            {
                "id": f"msg_{number}",
                "type": "message",
                "role": "assistant",
                "status": "incomplete" if is_cut and not answer.calls else "completed",
                "content": [said],
            }
        )
    for place, call in enumerate(answer.calls):
        items.append(
            {
                "id": f"fc_{number}-{place}",
                "type": "function_call",
                "status": "completed",
                "call_id": call_id(f"{response_id}/{place}", is_short=answer.has_short_ids),
                "name": call.name,
                "arguments": call.arguments,
            }
        )
    return items


def _repeated(asked: Mapping[str, object]) -> dict[str, object]:
    """What the request said, as far as the object has it."""
    given = {name: value for name, value in asked.items() if value is not None}
    text, reasoning, tools = given.get("text"), given.get("reasoning"), given.get("tools")
    form = text.get("format") if isinstance(text, dict) else None
    effort = reasoning.get("effort") if isinstance(reasoning, dict) else None
    tools = tools if isinstance(tools, list) else []
    return {
        **{name: given.get(name, otherwise) for name, otherwise in _REPEATED.items()},
        "reasoning": {"effort": effort, "summary": None},
        "text": {"format": form or {"type": "text"}},
        # OpenAI's types want both fields of a tool.
        "tools": [{"parameters": None, "strict": None, **tool} for tool in tools],
    }


def _usage(output: RequestOutput, answer: ChatAnswer) -> dict[str, object]:
    num_output = sum(len(completion.token_ids) for completion in output.completions)
    return {
        "input_tokens": output.num_prompt_tokens,
        # Nobody pays for what the cache keeps.
        "input_tokens_details": {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens or 0},
        "total_tokens": output.num_prompt_tokens + num_output,
    }
