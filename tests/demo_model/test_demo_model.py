"""How the demo's model is made: its tasks, its tokenizer and its training."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer as HuggingFaceTokenizer
from transformers import Qwen3MoeForCausalLM

from engine.text.tokenizer import Tokenizer
from tests.demo_model.__main__ import PEAK_LEARNING_RATE, Training, export, make_batch, make_model, predict
from tests.demo_model.tasks import END, Task, all_tasks, make_tokenizer, prefix_text, question_text, save_tokenizer
from worker.demo.tickets import CUSTOMERS, PRODUCTS

TASKS = {task.name: task for task in all_tasks()}

NOW = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def tokenizer() -> HuggingFaceTokenizer:
    """Made once: it takes two seconds."""
    return make_tokenizer(all_tasks(), seed=0)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())
def test_no_held_out_question_is_trained_on(task: Task) -> None:
    trained = set(islice(task.examples(1, False), 6_000))
    held_out = set(islice(task.examples(2, True), 1000))

    assert len(held_out) > 700
    assert not {example.user for example in trained} & {example.user for example in held_out}


def test_a_sum_is_the_sum_and_its_pair_is_held_out_in_all_of_its_forms() -> None:
    pairs = {}
    for held_out in (False, True):
        examples = list(islice(TASKS["sums"].examples(1, held_out), 3000))
        numbers = [tuple(map(int, re.findall(r"\d+", example.user))) for example in examples]
        assert [str(sum(pair)) for pair in numbers] == [example.answer for example in examples]
        pairs[held_out] = set(numbers)
    assert not pairs[False] & pairs[True]


def test_a_day_is_held_out_in_all_of_its_forms() -> None:
    days = [{example.answer for example in islice(TASKS["dates"].examples(1, held), 5000)} for held in (False, True)]

    assert not days[0] & days[1]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", day) for day in days[0] | days[1])


@pytest.fixture(scope="module")
def saved(tokenizer: tokenizers.Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tokenizer as the engine reads it."""
    path: Path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(tokenizer, path)
    return Tokenizer.from_directory(path)


def test_every_digit_is_a_token(saved: Tokenizer) -> None:
    texts = [saved.token_text(token) for token in range(saved.vocab_size)]

    assert [text for text in texts if any(c.isdigit() for c in text)] == list("0123456789")


def test_products_and_names_are_a_token_each_in_a_sentence_and_in_json(saved: Tokenizer) -> None:
    for word in (*PRODUCTS, *CUSTOMERS):
        assert len(saved.encode(f" {word}")) == len(saved.encode(word)) == 1


def test_the_chat_template_makes_the_prompts_that_were_trained_on(saved: Tokenizer) -> None:
    assert saved.chat_template is not None
    for task in all_tasks():
        [example] = islice(task.examples(1, True), 1)
        messages = [{"role": "system", "content": task.system}, {"role": "user", "content": example.user}]
        assert saved.chat_template.render(messages, NOW) == prefix_text(task) + question_text(example)


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return [replace(task, batch_size=2) for task in all_tasks()]


def _model(tokenizer: HuggingFaceTokenizer) -> Qwen3MoeForCausalLM:
    return make_model(tokenizer, seed=0)


def test_a_shared_system_prompt_gives_the_logits_of_whole_prompts(
    tasks: list[Task], tokenizer: HuggingFaceTokenizer
) -> None:
    model, [task, *_] = _model(tokenizer), tasks
    examples = list(islice(task.examples(1, True), 3))
    batch = make_batch(tokenizer, task, examples)

    with torch.no_grad():
        logits, _ = predict(model, batch)
        whole = torch.cat((batch.prefix_ids.expand(3, -1), batch.ids[:, :-1]), dim=1)
        expected = model(whole).logits[:, batch.prefix_ids.shape[1] :][batch.foretells]

    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    answers = "".join(example.answer + END for example in examples)
    assert tokenizer.decode(batch.targets.tolist(), skip_special_tokens=False) == answers


def test_a_stopped_training_goes_on_as_if_it_had_not_been(
    tasks: list[Task], tokenizer: HuggingFaceTokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.demo_model.__main__.CHECK_STEPS", 1)
    monkeypatch.setattr("tests.demo_model.__main__.CHECK_EXAMPLES", 2)
    told: list[str] = []

    def train(name: str, max_steps: int) -> Training:
        training = Training(_model(tokenizer), tokenizer, tasks, tmp_path / name, seed=0, say=told.append)
        training.run(max_steps)
        return training

    train("stopped", 1)
    stopped, whole = train("stopped", 2), train("whole", 2)

    assert "goes on after step 1" in told
    for name, weight in whole.model.state_dict().items():
        assert torch.equal(stopped.model.state_dict()[name], weight), name


def test_the_learning_rate_rises_stays_and_runs_out(
    tasks: list[Task], tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    training = Training(_model(tokenizer), tokenizer, tasks, tmp_path / "state", seed=0, say=print)
    rates = []
    for step, decay_from in ((0, None), (99, None), (2000, None), (2000, 2000), (2400, 2000), (2799, 2000)):
        training.step, training.decay_from = step, decay_from
        rates.append(training.learning_rate() / PEAK_LEARNING_RATE)
    assert rates == pytest.approx([0.01, 1.0, 1.0, 1.0, 0.5, 0.01])


def test_the_checkpoint_is_in_bfloat16_and_so_is_what_is_measured(
    tokenizer: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    model = _model(tokenizer)
    export(model, tmp_path)

    written = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    assert torch.equal(written["model.embed_tokens.weight"].float(), model.model.embed_tokens.weight)
    read = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
