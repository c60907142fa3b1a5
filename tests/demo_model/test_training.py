from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import Qwen3MoeForCausalLM

from tests.demo_model import training as training_module
from tests.demo_model.batch import make_batch
from tests.demo_model.export import export
from tests.demo_model.model import make_model, predict
from tests.demo_model.task import Task
from tests.demo_model.tasks import all_tasks
from tests.demo_model.tokenizer import END
from tests.demo_model.training import Training


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    return [replace(task, batch_size=2) for task in all_tasks()]


def _model(tokenizer: Tokenizer) -> Qwen3MoeForCausalLM:
    return make_model(tokenizer, seed=0)


def test_a_shared_system_prompt_gives_the_logits_of_whole_prompts(tasks: list[Task], tokenizer: Tokenizer) -> None:
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
    tasks: list[Task], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "CHECK_STEPS", 1)
    monkeypatch.setattr(training_module, "CHECK_EXAMPLES", 2)
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


def test_the_learning_rate_rises_stays_and_runs_out(tasks: list[Task], tokenizer: Tokenizer, tmp_path: Path) -> None:
    training = Training(_model(tokenizer), tokenizer, tasks, tmp_path / "state", seed=0, say=print)
    rates = []
    for step, decay_from in ((0, None), (99, None), (2000, None), (2000, 2000), (2400, 2000), (2799, 2000)):
        training.step, training.decay_from = step, decay_from
        rates.append(training.learning_rate() / training_module.PEAK_LEARNING_RATE)
    assert rates == pytest.approx([0.01, 1.0, 1.0, 1.0, 0.5, 0.01])


def test_the_checkpoint_is_in_bfloat16_and_so_is_what_is_measured(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = _model(tokenizer)
    export(model, tmp_path)

    written = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in written.values()} == {torch.bfloat16}
    assert torch.equal(written["model.embed_tokens.weight"].float(), model.model.embed_tokens.weight)
    read = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], weight), name
