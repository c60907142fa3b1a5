"""What a model needs and a device has: the memory profile at start, on simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import structlog
import torch
from numpy.typing import NDArray

from engine.checkpoint.weights import Checkpoint
from engine.engine import Engine
from engine.errors import CapabilityError
from engine.execution.decode_graphs import DecodeGraphs
from engine.kv_cache.tensors import KVCacheTensors
from engine.loading import load as load_decoder_parts
from engine.loading.kv_pool import DeviceMemory, expected_weights_bytes
from engine.model_status import MemoryProfile
from engine.models.decoder import DecoderModel, weights_bytes
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.staging import ArrayStaging
from engine.structured.grammar import Grammar
from settings import EngineSettings, Source
from tests.support.devices import simulated_device
from tests.support.engines import StaticRunner, load_engine, run_all
from tests.support.tensors import needs_vnni
from tests.support.tiny_checkpoint import decoder_config, make_checkpoint

MIB = 1 << 20
TOTAL = 40 * MIB
SMALL = {"engine.max_num_seqs": "8", "engine.max_num_batched_tokens": "256", "engine.kv_cache.num_blocks": "none"}

GPU = torch.device("cuda")

SHAPE = {"hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048, "num_hidden_layers": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(
        tmp_path_factory.mktemp("model"), vocab_size=8192, num_hidden_layers=1, max_position_embeddings=8192
    )


def load(model: Path, **overrides: str) -> Engine:
    named = {f"engine.{name.replace('__', '.')}": value for name, value in overrides.items()}
    return load_engine(model, SMALL | named)


def profile_of(engine: Engine) -> MemoryProfile:
    profile = engine.model_interface.status().memory_profile
    assert profile is not None
    return profile


def heavy_requests(count: int) -> list[Request]:
    params = SamplingParams(
        max_tokens=3, temperature=0.9, top_k=40, top_p=0.9, repetition_penalty=1.2, logprobs=5, prompt_logprobs=5,
        ignore_eos=True,
    )  # fmt: skip
    return [Request(f"r{index}", tuple(range(index, index + 150)), params) for index in range(count)]


def test_a_machine_without_a_gpu_has_no_profile(model: Path) -> None:
    assert load_engine(model).model_interface.status().memory_profile is None


def test_the_pool_is_what_weights_and_a_step_leave_of_usable_memory(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB):
        engine = load(model)
    profile, status = profile_of(engine), engine.model_interface.status()
    assert (profile.total_bytes, profile.usable_bytes) == (TOTAL, int(TOTAL * 0.9))
    assert profile.weights_bytes == status.weights_bytes
    assert profile.weights_bytes + profile.other_bytes == 6 * MIB
    assert profile.activations_bytes > 4 * 8192 * 8 * 3  # logits of 8 rows, and copies of them
    bytes_per_block = status.kv_bytes // status.num_blocks
    assert status.num_blocks == profile.kv_bytes // bytes_per_block
    assert engine.settings.engine.kv_cache.num_blocks == status.num_blocks
    assert engine.effective.source_of("engine.kv_cache.num_blocks") is Source.DERIVED


def test_no_job_takes_more_than_the_usable_part(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB) as memory:
        engine = load(model)
        memory.reset_peak()
        run_all(engine, heavy_requests(9))
    taken = memory.peak_bytes()
    assert taken <= profile_of(engine).usable_bytes
    assert taken > 0.8 * profile_of(engine).usable_bytes  # and little is left lying


def test_grammars_and_penalties_stage_no_more_than_was_measured(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    staged: dict[ArrayStaging, list[int]] = {}
    send = ArrayStaging.send

    def noted(staging: ArrayStaging, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
        staged.setdefault(staging, []).append(sum(array.nbytes for array in arrays))
        return send(staging, arrays)

    monkeypatch.setattr(ArrayStaging, "send", noted)
    with simulated_device(TOTAL, held_bytes=6 * MIB):
        engine = load(model)
        # Two buffers by turns, and both must have held the largest.
        measured = max(min(max(sent[0::2]), max(sent[1::2])) for sent in staged.values() if len(sent) > 1)
        staged.clear()
        params = SamplingParams(
            max_tokens=9, seed=1, top_k=40, repetition_penalty=1.2, logprobs=5, grammar=Grammar("regex", "[a-z]{9}")
        )
        run_all(engine, [Request(f"r{index}", tuple(range(index, index + 20)), params) for index in range(8)])
    assert 8 * 8192 < max(map(max, staged.values())) <= measured  # a byte a token of the vocabulary for each row


def test_what_other_processes_hold_is_not_ours(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB):
        alone = load(model).stats().num_blocks
    with simulated_device(TOTAL, held_bytes=9 * MIB):
        crowded = load(model)
    status = crowded.model_interface.status()
    assert alone - status.num_blocks == pytest.approx(3 * MIB / (status.kv_bytes / status.num_blocks), abs=1)


def test_room_is_left_for_what_the_allocator_rounds_the_pool_up_by(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB) as memory:
        memory.rounding_bytes = MIB
        profile = profile_of(load(model))
    assert profile.weights_bytes + profile.other_bytes == 8 * MIB  # keys and values of a layer


def test_graphs_are_measured_dropped_and_made_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []
    replays: list[list[tuple[int, ...]]] = []

    def make(model: DecoderModel, kv_cache: KVCacheTensors, _: EngineSettings, max_model_len: int) -> DecodeGraphs:
        made.append((kv_cache.num_blocks, max_model_len))
        backend = StaticRunner()
        replays.append(backend.replays)
        return DecodeGraphs(model, kv_cache, backend, (1, 8), max_model_len)

    monkeypatch.setattr(load_decoder_parts, "make_decode_graphs", make)
    with simulated_device(TOTAL, held_bytes=6 * MIB) as memory:
        engine = load(model)
        memory.reset_peak()
        run_all(engine, heavy_requests(3))
    assert made == [(2, 8192), (engine.stats().num_blocks, engine.max_model_len)]
    assert profile_of(engine).graphs_bytes >= 4 * 8192 * 8  # the logits they write
    assert profile_of(engine).weights_bytes + profile_of(engine).other_bytes == 6 * MIB  # nothing of them is left
    assert memory.peak_bytes() <= profile_of(engine).usable_bytes
    assert replays[0] == [(8192,) * 8] * 2  # whatever a replay takes is measured, too
    assert len(replays[1]) > 2


@pytest.mark.parametrize(("num_blocks", "fits"), [(64, True), (3600, False)])
def test_a_pool_that_was_set_is_taken_and_the_profile_says_whether_it_fits(
    model: Path, num_blocks: int, fits: bool
) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB), structlog.testing.capture_logs() as logs:
        engine = load(model, kv_cache__num_blocks=str(num_blocks))
    (event,) = (log for log in logs if log["event"] == "memory_profile")
    assert (event["fits"], event["pool_blocks"], event["pool_tokens"]) == (fits, num_blocks, (num_blocks - 1) * 16)
    assert event["log_level"] == ("info" if fits else "warning")
    assert engine.stats().num_blocks == num_blocks


def test_too_little_memory_says_where_it_went_and_what_to_change(model: Path) -> None:
    with simulated_device(24 * MIB, held_bytes=6 * MIB), pytest.raises(CapabilityError) as caught:
        load(model)
    said = str(caught.value)
    assert "raise engine.gpu_memory_utilization (0.9 of 25165824 bytes; weights take" in said
    assert "lower engine.max_num_batched_tokens or engine.max_num_seqs" in said


def test_a_step_that_does_not_fit_names_the_settings_that_make_it_smaller(model: Path) -> None:
    with simulated_device(8 * MIB, held_bytes=7 * MIB + MIB // 2), pytest.raises(CapabilityError) as caught:
        load(model, max_num_batched_tokens="4096")
    said = str(caught.value)
    assert "a step of 4096 tokens and 8 sequences" in said
    assert "lower engine.max_num_batched_tokens or engine.max_num_seqs" in said


def test_a_pool_that_was_set_and_cannot_be_made_names_its_setting(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=6 * MIB), pytest.raises(CapabilityError) as caught:
        load(model, kv_cache__num_blocks="100000")
    assert "out of memory for the KV pool, 409600000 bytes" in str(caught.value)
    assert "engine.kv_cache.num_blocks" in str(caught.value)


def test_a_length_that_the_measured_pool_does_not_hold_is_refused(model: Path) -> None:
    with simulated_device(TOTAL, held_bytes=19 * MIB), pytest.raises(CapabilityError) as caught:
        load(model, max_model_len="8192")
    assert "engine.max_model_len=8192" in str(caught.value)


def _cuda(**answers: Any) -> Any:
    return mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=value) for name, value in answers.items()})


def test_free_and_total_are_the_drivers() -> None:
    with _cuda(mem_get_info=(3, 8)):
        memory = DeviceMemory(GPU)
        assert (memory.free_bytes(), memory.total_bytes) == (3, 8)


def test_the_peak_is_what_was_reserved_once_everything_has_run() -> None:
    with _cuda(synchronize=None, max_memory_reserved=5):
        assert DeviceMemory(GPU).peak_bytes() == 5
        torch.cuda.synchronize.assert_called_once_with(GPU)  # type: ignore[attr-defined]  # a Mock here


def test_a_new_peak_begins_after_what_runs_with_an_empty_cache() -> None:
    calls = mock.Mock()
    with mock.patch.multiple(
        torch.cuda,
        synchronize=calls.synchronize,
        empty_cache=calls.empty_cache,
        reset_peak_memory_stats=calls.reset_peak_memory_stats,
    ):
        DeviceMemory(GPU).reset_peak()
    assert [name for name, *_ in calls.mock_calls] == ["synchronize", "empty_cache", "reset_peak_memory_stats"]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"engine.dtype": "bfloat16"},
        {"engine.deterministic": "true"},
        pytest.param(
            {"engine.quantization": "int8"},
            marks=needs_vnni,
        ),
    ],
    ids=["float32", "bfloat16", "deterministic", "int8"],
)
def test_what_is_expected_is_within_a_hundredth_of_what_is_loaded(
    tmp_path: Path, overrides: dict[str, str], tied: bool
) -> None:
    make_checkpoint(tmp_path, "qwen3", tie_word_embeddings=tied, **SHAPE)
    engine = load_engine(tmp_path, overrides)
    with Checkpoint.open(tmp_path) as checkpoint:
        expected = expected_weights_bytes(checkpoint, decoder_config(tmp_path), engine.settings.engine)
    actual = weights_bytes(engine.model)
    assert abs(actual - expected) < 0.01 * actual
