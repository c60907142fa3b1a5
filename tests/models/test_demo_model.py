"""The demo's model answers right, and transformers gives the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.engine import Engine
from engine.loading.quantize import quantise_checkpoint
from engine.request import Request
from engine.sampling_params import SamplingParams
from tests.demo_model.tasks import Task, all_tasks
from tests.support.engines import load_engine, run_all, tokens_of
from tests.support.request_lines import CHECKPOINT, GOAL, run_lines, ticket_lines
from worker.demo.run import NUM_TICKETS, TICKETS_SEED
from worker.demo.tickets import GradedAnswers, answer_text, demo_lines, numbered_tickets

MAX_BYTES = 8_000_000
NUM_PROMPTS = 50


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = load_engine(CHECKPOINT)
    yield engine
    engine.close()


def test_it_is_small_and_its_weights_are_bfloat16() -> None:
    weights = load_file(CHECKPOINT / "model.safetensors")

    assert (CHECKPOINT / "model.safetensors").stat().st_size < MAX_BYTES
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert 1_000_000 < sum(weight.numel() for weight in weights.values()) < 4_000_000


def test_held_out_tickets_are_answered_right(engine: Engine) -> None:
    tickets = numbered_tickets(1, 60)

    graded = GradedAnswers.of_records(tickets, run_lines(engine, ticket_lines(tickets)))

    assert graded.accuracy >= GOAL, graded.wrong


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "w8a8", "w4a16"])
def test_quantised_it_still_answers_right(
    scheme: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tickets, model = numbered_tickets(TICKETS_SEED, NUM_TICKETS), CHECKPOINT  # those of `millrace demo`
    if scheme is not None:
        model = tmp_path / scheme
        quantise_checkpoint(CHECKPOINT, model, scheme, group_size=32)  # its experts have 96 inputs
    engine = load_engine(model)

    graded = GradedAnswers.of_records(tickets, run_lines(engine, demo_lines(tickets)))

    engine.close()
    size = (model / "model.safetensors").stat().st_size
    with capsys.disabled():
        print(f"\n{scheme or 'bfloat16'}: {graded.accuracy:.1%} right, {size} bytes of weights")
    assert graded.accuracy >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("by_schema", [True, False], ids=["by schema", "free"])
def test_a_thousand_held_out_tickets(dtype: str, by_schema: bool, capsys: pytest.CaptureFixture[str]) -> None:
    tickets = numbered_tickets(2, 1000)
    engine = load_engine(CHECKPOINT, {"engine.dtype": dtype})

    graded = GradedAnswers.of_records(tickets, run_lines(engine, ticket_lines(tickets, by_schema=by_schema)))

    engine.close()
    with capsys.disabled():
        print(f"\n{dtype}, {'by schema' if by_schema else 'free'}: {graded.accuracy:.1%} right, {graded.num_right}")
    assert graded.accuracy >= GOAL


@pytest.mark.parametrize("task", [task for task in all_tasks() if task.name in ("dates", "sums")], ids=lambda t: t.name)
def test_held_out_dates_and_sums_are_answered_right(engine: Engine, task: Task) -> None:
    examples = list(islice(task.examples(1, True), 200))
    lines = [_chat_line(number, task.system, example.user) for number, example in enumerate(examples)]

    answers = {record["custom_id"]: answer_text(record) for record in run_lines(engine, lines)}

    num_right = sum(answers[str(number)] == example.answer for number, example in enumerate(examples))
    assert num_right >= GOAL * len(examples)


def test_the_engines_tokens_are_transformers_first_choices(engine: Engine) -> None:
    """At every position of fifty answers, so that the greedy answers are the same."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32).eval()
    params = SamplingParams(max_tokens=64, temperature=0.0)
    prompts = [
        tokenizer.apply_chat_template(line["body"]["messages"], add_generation_prompt=True)["input_ids"]
        for line in ticket_lines(numbered_tickets(1, NUM_PROMPTS))
    ]
    outputs = run_all(engine, [Request(str(i), tuple(prompt), params) for i, prompt in enumerate(prompts)])

    answers = [tokens_of(outputs[str(number)]) for number in range(NUM_PROMPTS)]
    whole = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
    with torch.no_grad():  # padded on the right, where no token of ours looks
        choices = model(torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)).logits.argmax(-1)
    for prompt, answer, chosen in zip(prompts, answers, choices, strict=True):
        first = len(prompt) - 1
        assert chosen[first : first + len(answer)].tolist() == answer


def _chat_line(number: int, system: str, user: str) -> Mapping[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    body = {"messages": messages, "max_tokens": 16, "temperature": 0}
    return {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
