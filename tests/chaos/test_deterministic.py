"""`engine.deterministic`: the bits of a request's logits depend on nothing but the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.deterministic_runs import SIZES, Run, differing, make_requests, run
from tests.support.tiny_checkpoint import VOCAB_SIZE, Family, make_checkpoint

FAMILIES: list[Family] = ["llama", "qwen3", "qwen3_moe"]
DTYPES = ["float32", "bfloat16"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[Family, Path]:
    return {family: make_checkpoint(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


def shuffled_runs(path: Path, dtype: str, *, count: int, num_runs: int, deterministic: bool) -> list[Run]:
    requests = make_requests(count, VOCAB_SIZE)
    common = {"dtype": dtype, "deterministic": str(deterministic).lower()}
    runs = [run(path, requests, common | dict(size), shuffle=index) for index, size in enumerate(SIZES[:num_runs])]
    assert runs[0].num_preemptions == 0
    assert sum(run.num_preemptions for run in runs) > 0
    assert sum(run.cached_tokens for run in runs) > 0
    return runs


def test_forty_requests_in_three_runs(checkpoints: dict[Family, Path]) -> None:
    runs = shuffled_runs(checkpoints["qwen3_moe"], "bfloat16", count=40, num_runs=3, deterministic=True)
    assert differing(runs) == (0, 0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_five_hundred_requests_in_five_runs(
    checkpoints: dict[Family, Path], family: Family, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = shuffled_runs(checkpoints[family], dtype, count=500, num_runs=5, deterministic=True)
    report(capsys, f"{family} {dtype}, deterministic", runs)
    assert differing(runs) == (0, 0)


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_without_it_the_same_requests_differ(
    checkpoints: dict[Family, Path], family: Family, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = shuffled_runs(checkpoints[family], dtype, count=500, num_runs=5, deterministic=False)
    report(capsys, f"{family} {dtype}, not deterministic", runs)
    assert differing(runs)[0] > 0, "a comparison that finds no difference here proves nothing there"


def report(capsys: pytest.CaptureFixture[str], name: str, runs: list[Run]) -> None:
    logits, tokens = differing(runs)
    positions = sum(map(len, runs[0].logits.values()))
    with capsys.disabled():
        print(
            f"\n{name}: of {len(runs[0].tokens)} requests ({positions} tokens) in {len(runs)} runs "
            f"{logits} differ in logits, {tokens} in tokens; "
            f"{sum(run.num_preemptions for run in runs)} preemptions, {sum(run.cached_tokens for run in runs)} cached"
        )
