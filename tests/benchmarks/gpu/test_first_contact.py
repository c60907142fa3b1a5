"""A GPU's first minutes on tiny shapes and a CPU: each stage a process of its own, or several."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import kernels.triton
from kernels import reference
from kernels.dispatch import operation_names
from kernels.triton.attention_launch import AttentionLaunch
from tests.benchmarks.gpu import first_contact, sweeps
from tests.benchmarks.gpu.first_contact import BUDGET_S, STAGES, FirstContact, rounds, share_of_cores
from tests.benchmarks.gpu.sanitizers import INSTALLED, ToolRun, small_cases, tool_command
from tests.benchmarks.gpu.stages import stage_figures
from tests.benchmarks.gpu.sweeps import Place
from tests.benchmarks.gpu.workload import Deadline
from tests.benchmarks.kernels import check_operation
from tests.benchmarks.operation_cases import OperationCase, operation_cases
from tests.kernels.aot.test_table import kernel_names
from tests.support.compiled_kernels import recorded_specialisations

TINY = ["--device", "cpu", "--tiny"]
CPU = torch.device("cpu")
NAMES = [stage.name for stage in STAGES]


def contact(path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]]]:
    """Exit code and the lines of a trial on a CPU."""
    code = first_contact.main(["--out", str(path), *TINY, *arguments])
    return code, [json.loads(line) for line in (path / "lines.jsonl").read_text().splitlines()]


def test_whatever_every_stage_does_all_later_ones_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plants = [f"{name}{('', '=die')[number % 2]}" for number, name in enumerate(NAMES)]
    code, lines = contact(tmp_path, *[word for plant in plants for word in ("--plant", plant)])
    assert code == 1
    assert Counter((line["stage"], line.get("part", 0), line["blocking"]) for line in lines) == Counter(
        (stage.name, part, again) for stage in STAGES for part in range(stage.parts) for again in (False, True)
    )
    assert {line["ended"] for line in lines} == {"failed: exit code 1", "failed: SIGKILL"}
    assert lines[0]["error"] == "RuntimeError: planted in machine"
    kept = (tmp_path / "table.txt").read_text()
    assert kept in capsys.readouterr().out
    assert [line.split()[0] for line in kept.splitlines()[:-1]] == NAMES
    assert kept.count("not measured") == len(NAMES)
    assert kept.splitlines()[-1] == first_contact.TRIAL


def test_a_stage_that_hangs_is_ended_and_takes_no_later_ones_time(tmp_path: Path) -> None:
    """By a clock that goes on only when the test says so: machine has 0.59 s of 0.6, blas 0.007, as 5 of 450."""
    only = ["--only", "machine", "--only", "blas"]
    plants = ["--plant", "machine=hang", "--plant", "blas=hang", "--budget-s", "0.6"]
    options = first_contact.parse(["--out", str(tmp_path), *TINY, *only, *plants])
    # The clock is read as it starts, then for each run: to see what is left; if it is begun, as it begins and ends.
    times_s = iter([7.0, *(7.0, 7.0, 7.59), 7.59, *(7.59, 7.59, 7.6), 7.6])
    with (tmp_path / "lines").open("w") as lines, (tmp_path / "log").open("ab") as log:
        runs = [run for both in FirstContact(options, lines, log, lambda: next(times_s)).run() for run in both]
    assert [(run.stage.name, run.blocking, run.ended, round(run.seconds, 3)) for run in runs] == [
        ("machine", False, "out of time after 1 s", 0.59),
        ("machine", True, "not begun", 0),  # nothing is left of its time
        ("blas", False, "out of time after 0 s", 0.01),
        ("blas", True, "not begun", 0),
    ]
    assert next(times_s, None) is None


def test_checks_run_side_by_side_and_what_times_runs_alone(tmp_path: Path) -> None:
    checks = [stage.name for stage in STAGES if stage.checks]
    alone = [[name] for name in NAMES if name not in checks]
    assert [[stage.name for stage in together] for together in rounds(STAGES)] == [*alone[:2], checks, *alone[2:]]
    plants = [word for name in ("graphs", "warm-up") for word in ("--only", name, "--plant", f"{name}=hang")]
    _, lines = contact(tmp_path, *plants, "--budget-s", "1")
    first = [(line["stage"], line.get("part", 0), line["ended"]) for line in lines if not line["blocking"]]
    # One behind the other, the second would have had nothing left.
    assert sorted(first) == [(*one, "out of time after 1 s") for one in (("graphs", 0), ("graphs", 1), ("warm-up", 0))]


def test_side_by_side_every_core_has_its_processes() -> None:
    shares = [share_of_cores(range(16), number, 12) for number in range(12)]
    assert {*Counter(core for share in shares for core in share).values()} == {1, 2}
    assert {*map(len, shares)} == {2}
    assert share_of_cores([4, 6], 7, 12) == {4, 6}
    assert share_of_cores(range(16), 0, 1) == {*range(16)}


def test_what_stages_find_is_written_as_it_comes_and_no_figure_counts(tmp_path: Path) -> None:
    code, lines = contact(tmp_path, "--only", "machine")
    assert (code, [(line["stage"], line["ended"]) for line in lines if "ended" in line]) == (0, [("machine", "ok")])
    found = {line["figure"]: line for line in lines if "figure" in line}
    assert found["versions"]["torch"] == torch.__version__
    assert found["rates"]["headline"] == "rates not measured"


@pytest.mark.aot
def test_without_a_gpu_kernels_are_compiled_for_one(tmp_path: Path) -> None:
    code, lines = contact(tmp_path, "--only", "compile")
    assert (code, [line["ended"] for line in lines if "ended" in line]) == (0, ["ok"])
    (found,) = (line for line in lines if line.get("figure") == "compilation")
    assert found["ran_on"] == "no GPU: for sm_90"


@pytest.mark.slow
def test_every_stage_runs_without_a_gpu(tmp_path: Path) -> None:
    code, lines = contact(tmp_path, "--budget-s", "3000")
    assert [line for line in lines if not line.get("ok", True) or line.get("ended", "ok") != "ok"] == []
    assert code == 0
    assert json.loads((tmp_path / "tuned.json").read_text()).keys() <= {"none"}


def test_a_sweep_passes_over_what_does_not_fit_but_not_over_the_rules(tmp_path: Path) -> None:
    def figures(*times_us: float | Exception) -> list[dict[str, Any]]:
        """Of the sweep over a launch of prefill, and over two of decode if they and the rules take so long."""
        timing = mock.patch.object(sweeps.Place, "median_us", side_effect=(5.0, 4.0, *times_us))
        with timing, mock.patch.object(sweeps, "compile_ahead"):
            return list(stage_figures("attention", "cpu", tmp_path, is_tiny=True))

    prefill, figure = figures(5.0, MemoryError("too large"), 3.0)
    assert (prefill["best"], json.loads((tmp_path / "tuned.json").read_text())["none"].keys()) == (
        "[128, 64, 8, 3]",
        {"prefill_attention", "decode_attention", "decode_splits"},
    )
    assert figure["errors"] == {"[16, 1, 5, 224, 128, 8192, 4]": "MemoryError: too large"}
    assert (figure["best"], figure["choice"]["decode_splits"]) == ("[16, 1, 5, 224, 128, 8192, 2]", (128, 8192, 2))
    with pytest.raises(MemoryError, match="too large"):
        figures(MemoryError("too large"), 5.0, 3.0)
    with mock.patch.object(Deadline, "left_s", 0.0):
        late = figures()[1]
    assert (late["best"], set(late["errors"].values())) == ("rules", {"not tried: the time is up"})


def test_what_is_tried_of_attention_is_what_its_launches_read() -> None:
    rows = {AttentionLaunch(**options).block_m for options in sweeps.PREFILL_LAUNCHES}
    tiles = {AttentionLaunch(16, **options).tile for options in sweeps.DECODE_LAUNCHES}
    assert (rows, tiles) == ({64, 128}, {16, 32, 128})


def test_all_stages_together_have_the_budget() -> None:
    assert sum(max(stage.limit_s for stage in stages) for stages in rounds(STAGES)) == BUDGET_S


def test_operations_are_tried_in_cases_that_launch_every_kernel() -> None:
    cases = operation_cases(torch.float16, is_tiny=True)
    with recorded_specialisations(90) as recorded:
        for case in cases:
            case.run(kernels.triton, CPU)
    sources = Path(kernels.triton.__file__).parent.glob("*.py")
    assert {name for path in sources for name in kernel_names(path)} == {entry.partition(" ")[0] for entry in recorded}
    assert {*operation_names()} - {"pack"} == {case.operation for case in cases}
    assert len({case.name for case in cases}) == len(cases)


def test_a_wrong_result_and_one_that_changes_are_both_found() -> None:
    inputs = (torch.tensor([[1.0, 3.0]]), torch.ones(2))
    case = OperationCase("rms_norm", "rms_norm", inputs, lambda ops, *given: [ops.rms_norm(*given, 0.0)])
    right = reference.rms_norm(*inputs, 0.0)
    with mock.patch.object(kernels.triton, "rms_norm", side_effect=[right, right - 1, right]):
        changing = check_operation(case, kernels.triton, CPU, repeats=3)
    with mock.patch.object(kernels.triton, "rms_norm", return_value=torch.zeros(1, 2)):
        wrong = check_operation(case, kernels.triton, CPU, repeats=1)
    assert changing == {"ok": False, "differing_repeats": 1}
    assert not wrong["ok"]
    assert "at (0, 1): 0.0 where 1.34" in wrong["error"]


TOOL = """
import sys
print("========= COMPUTE-SANITIZER")
for name in sys.argv[1:]:
    print(f"case begins: {name}", flush=True)
    if name == "dies":
        sys.exit(3)
    if name == "writes":
        print("========= Invalid __global__ write of size 2 bytes\\n=========     at _kernel+0x10\\n=========")
    if name == "raises":
        print("raised: RuntimeError: no")
    print(f"case ends: {name}", flush=True)
print("========= ERROR SUMMARY: 1 error")
sys.exit(9)
"""


def test_a_sanitizer_reports_case_by_case_behind_a_crash_too(tmp_path: Path) -> None:
    figures: list[Any] = []
    place = Place(CPU, tmp_path, True, 0, 1, Deadline(60))
    ToolRun("memcheck", [sys.executable, "-c", TOOL], place, figures.append).check(["good", "dies", "writes", "raises"])
    assert [(figure.get("case"), figure["ok"], figure.get("found")) for figure in figures[:-1]] == [
        ("good", True, None),
        ("dies", False, ["the process ended in it, exit code 3"]),
        ("writes", False, ["Invalid __global__ write of size 2 bytes", "at _kernel+0x10"]),
        ("raises", False, ["raised: RuntimeError: no"]),
    ]
    assert figures[-1]["said"] == ["ERROR SUMMARY: 1 error"]
    assert (figures[-1]["exit_code"], figures[-1]["not_reached"]) == (9, [])
    ToolRun("memcheck", ["false"], place, figures.append).check(["good"])
    assert (figures[-1]["ok"], figures[-1]["not_reached"]) == (False, ["good"])


def test_the_sanitizers_get_a_case_of_every_operation() -> None:
    assert {case.operation for case in small_cases()} == {*operation_names()} - {"pack"}
    assert tool_command("racecheck", f"{INSTALLED}/compute-sanitizer")[1:3] == ["--tool", "racecheck"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cpu"], "--device cpu: needs --tiny"),
        (["--plant", "machine=sleep"], "--plant: 'machine=sleep'; accepted: one of machine, compile"),
        (["--budget-s", "-1"], "--budget-s: -1.0; accepted: more than 0"),
    ],
)
def test_first_contact_refuses_what_it_cannot_use(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        first_contact.main(["--out", str(tmp_path), *arguments])
    assert end.value.code == 2
    assert said in capsys.readouterr().err
