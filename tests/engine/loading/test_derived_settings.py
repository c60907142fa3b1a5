"""What follows from the device and from other settings: threads, dtype, precision, quantization."""

from __future__ import annotations

import json
import os
import platform
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from engine.checkpoint.weights import Checkpoint
from engine.errors import CapabilityError
from engine.loading import derived_settings
from engine.loading.derived_settings import computes_bfloat16, derive_settings, usable_cores
from engine.loading.quantization_error import measure_quantization_error
from engine.models.decoder import weights_bytes
from engine.models.placement import require_float32_sums
from kernels import cpu, deterministic, int8
from kernels.dispatch import NATIVE_OFF, choose_native
from kernels.native.operations import NativeOperations
from settings import Source, load_settings
from tests.support.devices import simulated_device
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.quantised_checkpoint import METHODS, quantise_checkpoint
from tests.support.tensors import needs_native, needs_vnni
from tests.support.tiny_checkpoint import make_checkpoint

PROMPT = list(range(40, 90))


@pytest.mark.parametrize(
    ("overrides", "is_ahead", "source"),
    [
        ({"engine.device": "cuda"}, True, Source.DERIVED),
        ({"engine.device": "cuda", "engine.async_scheduling": "off"}, False, Source.COMMAND_LINE),
        ({"engine.device": "cuda", "engine.decode.batched": "off"}, False, Source.DERIVED),
        (
            {"engine.device": "cuda", "engine.decode.batched": "off", "engine.async_scheduling": "on"},
            True,
            Source.COMMAND_LINE,
        ),
        ({"engine.device": "cpu"}, False, Source.DERIVED),
    ],
)
def test_steps_run_ahead_on_a_gpu_that_decodes_in_batches(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, overrides: dict[str, str], is_ahead: bool, source: Source
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)  # of this machine's devices, if it has any
    values = {"model.path": str(tiny_model), **overrides}
    with simulated_device(1 << 24):
        effective = derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    assert effective.settings.engine.async_scheduling is is_ahead
    assert effective.source_of("engine.async_scheduling") is source


@pytest.mark.parametrize(
    ("gib", "overrides", "expected"),
    [
        (8, {}, (64, 2048)),
        (24, {}, (256, 8192)),
        (80, {}, (256, 8192)),
        (140, {}, (512, 8192)),
        (140, {"engine.max_num_seqs": "9"}, (9, 8192)),
        (140, {"engine.max_num_seqs": "9000", "engine.max_num_batched_tokens": "9001"}, (9000, 9001)),
        (140, {"engine.max_num_batched_tokens": "100"}, (100, 100)),
        (140, {"engine.max_num_batched_tokens": "2048"}, (512, 2048)),
    ],
)
def test_steps_of_a_gpu_are_as_large_as_its_memory_allows(
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    gib: int,
    overrides: dict[str, str],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    values = {"model.path": str(tiny_model), "engine.device": "cuda", "engine.kv_cache.num_blocks": "99", **overrides}
    with simulated_device(gib << 30):
        effective = derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    settings = effective.settings.engine
    assert (settings.max_num_seqs, settings.max_num_batched_tokens) == expected
    for key in ("engine.max_num_seqs", "engine.max_num_batched_tokens"):
        assert (effective.source_of(key) is Source.DERIVED) is (key not in overrides and gib > 8)


@pytest.mark.parametrize(
    ("hidden_size", "overrides", "expected"),
    [
        (896, {}, 8192),  # no step has more
        (1024, {}, 8192),
        (1024, {"engine.max_num_batched_tokens": "4096"}, 4096),
        (1024, {"engine.cuda_graphs.chunk_tokens": "512"}, 512),
        (1152, {}, 6472),
        (1152, {"engine.cuda_graphs.enabled": "off"}, 2048),
        (2048, {}, 2048),
        (4096, {}, 2048),
    ],
)
def test_large_steps_of_small_models_are_captured(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hidden_size: int,
    overrides: dict[str, str],
    expected: int,
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    path = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_size": hidden_size}))
    values = {"model.path": str(path), "engine.device": "cuda", "engine.kv_cache.num_blocks": "99", **overrides}
    with simulated_device(80 << 30):
        effective = derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    assert effective.settings.engine.cuda_graphs.chunk_tokens == expected
    is_derived = expected != 2048 and "engine.cuda_graphs.chunk_tokens" not in overrides
    assert (effective.source_of("engine.cuda_graphs.chunk_tokens") is Source.DERIVED) is is_derived


def test_steps_of_a_cpu_keep_their_defaults(tiny_model: Path) -> None:
    values = {"model.path": str(tiny_model), "engine.device": "cpu"}
    effective = derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    for key, value in (("engine.max_num_seqs", 64), ("engine.max_num_batched_tokens", 2048)):
        assert effective.source_of(key) is Source.DEFAULT
        assert next(row for row in effective.rows() if row.key == key).value == value


@pytest.mark.parametrize(("text", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)])
def test_a_quota_bounds_the_threads(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path / "cpu.max") == (cores or len(os.sched_getaffinity(0)))


def test_without_a_container_every_allowed_core_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("machine", "bf16_instructions", "tiles", "expected"),
    [
        ("x86_64", False, False, False),  # AVX-512 alone: oneDNN says yes and emulates
        ("x86_64", True, False, True),
        ("AMD64", False, True, True),
        ("aarch64", False, False, True),  # there oneDNN's answer is about the instructions
    ],
)
def test_on_x86_it_takes_instructions_for_it(
    monkeypatch: pytest.MonkeyPatch, machine: str, bf16_instructions: bool, tiles: bool, expected: bool
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: bf16_instructions)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: tiles)
    assert computes_bfloat16() is expected


def test_what_onednn_cannot_do_at_all_is_not_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    assert not computes_bfloat16()


def test_determinism_is_off_unless_asked_for(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    assert not engine.settings.engine.deterministic
    assert engine.model.ops is not deterministic


def test_the_model_and_the_sampler_get_the_deterministic_operations(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint, {"engine.deterministic": "true"})
    assert engine.model.ops is deterministic
    assert engine._sampler._ops is deterministic


def test_it_is_refused_on_a_gpu(moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with pytest.raises(CapabilityError, match=r"engine\.deterministic=true: not available on cuda.*accepted: false"):
        load_engine(moe_checkpoint, {"engine.deterministic": "true", "engine.device": "cuda"})


@pytest.mark.parametrize(("group_size", "accepted"), [(16, True), (8, False)])
def test_a_gpu_takes_the_quantised_checkpoints_it_has_kernels_for(
    group_size: int, accepted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(derived_settings, "operations", lambda _: None)
    plain = make_checkpoint(tmp_path / "plain", "qwen3")
    method = METHODS["gptq"]
    method = replace(method, config=method.config | {"group_size": group_size}, group=group_size)
    quantised, _ = quantise_checkpoint(plain, tmp_path, method)
    values = {"model.path": str(quantised), "engine.device": "cuda"}
    message = (
        r"engine\.device=cuda: the weights of the checkpoint: .* int4, groups of 8; accepted: groups of a multiple of "
        "16, or cpu"
    )
    refused = nullcontext() if accepted else pytest.raises(CapabilityError, match=message)
    with simulated_device(80 << 30), refused:
        derive_settings(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))


def test_no_matrix_product_may_sum_in_less_than_float32() -> None:
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction)
    try:
        require_float32_sums()
        assert not matmul.allow_bf16_reduced_precision_reduction
        assert not matmul.allow_fp16_reduced_precision_reduction
        assert not matmul.allow_tf32
    finally:
        matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_reduced_precision_reduction = before


def test_quantization_is_off_unless_asked_for(moe_checkpoint: Path) -> None:
    assert load_engine(moe_checkpoint).model.ops is not int8


def test_without_native_kernels_all_operations_are_pytorchs(moe_checkpoint: Path) -> None:
    assert load_engine(moe_checkpoint, {"engine.native_kernels": "off"}).model.ops is cpu


@needs_native
def test_native_kernels_are_chosen_by_the_machine_or_by_name(moe_checkpoint: Path) -> None:
    engine = load_engine(moe_checkpoint)
    chosen = choose_native(torch.device("cpu")).variant
    assert engine.settings.engine.native_kernels == chosen
    for variant in {chosen, "base"} - {NATIVE_OFF}:
        ops = load_engine(moe_checkpoint, {"engine.native_kernels": variant}).model.ops
        assert isinstance(ops, NativeOperations)
        assert ops.variant == variant


def test_a_build_without_native_kernels_runs_in_pytorch_and_says_so(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("kernels.native.library.LIBRARY", tmp_path / "none.so")
    engine = load_engine(moe_checkpoint)
    assert engine.model.ops is cpu
    assert engine.settings.engine.native_kernels == "off"
    assert "install a C++ compiler" in choose_native(torch.device("cpu")).reason
    with pytest.raises(CapabilityError, match=r"engine\.native_kernels=avx2: .*not built.*install a C\+\+ compiler"):
        load_engine(moe_checkpoint, {"engine.native_kernels": "avx2"})


@pytest.mark.parametrize("own", [{"engine.deterministic": "true"}, {"engine.quantization": "int8"}])
def test_native_kernels_are_refused_where_there_are_others(moe_checkpoint: Path, own: dict[str, str]) -> None:
    if "engine.quantization" in own and not torch.cpu._is_vnni_supported():
        pytest.skip("needs a CPU with AVX-512 VNNI")
    assert load_engine(moe_checkpoint, own).settings.engine.native_kernels == "off"
    with pytest.raises(CapabilityError, match=r"engine\.native_kernels=base: not together with .*accepted: auto, off"):
        load_engine(moe_checkpoint, own | {"engine.native_kernels": "base"})


@needs_vnni
def test_a_load_with_int8_reads_each_weight_once(moe_checkpoint: Path) -> None:
    with mock.patch.object(Checkpoint, "read", autospec=True, side_effect=Checkpoint.read) as read:
        engine = load_engine(moe_checkpoint, {"engine.quantization": "int8"})
    assert engine.model.ops is int8
    names = [call.args[1] for call in read.call_args_list]
    assert len(names) == len(set(names)) > 0


@needs_vnni
def test_the_error_of_int8_is_measured_on_request(moe_checkpoint: Path) -> None:
    values = {"model.path": str(moe_checkpoint), "engine.device": "cpu", "engine.quantization": "int8"}
    error = measure_quantization_error(load_settings(values, environ={}, dotenv_path=Path(os.devnull)))
    assert 0 < error.mean_error < error.max_error < 1
    assert error.mean_error < 0.1
    assert error.same_greedy_tokens > 0.8


@needs_vnni
def test_its_weights_take_about_a_quarter_of_float32(moe_checkpoint: Path) -> None:
    plain = weights_bytes(load_engine(moe_checkpoint).model)
    model = load_engine(moe_checkpoint, {"engine.quantization": "int8"}).model
    embedding = model.embed_tokens.nbytes
    assert weights_bytes(model) - embedding < 0.5 * (plain - embedding)  # scales weigh much in so small a model


@needs_vnni
def test_a_request_gets_the_same_tokens_alone_and_beside_others(moe_checkpoint: Path) -> None:
    requests = [greedy_request(str(index), PROMPT[index:], 12) for index in range(6)]
    together = run_all(load_engine(moe_checkpoint, {"engine.quantization": "int8"}), requests)
    for request in requests:
        alone = run_all(load_engine(moe_checkpoint, {"engine.quantization": "int8"}), [request])
        assert tokens_of(alone[request.request_id]) == tokens_of(together[request.request_id])


@needs_vnni
def test_it_is_refused_together_with_deterministic(moe_checkpoint: Path) -> None:
    with pytest.raises(CapabilityError, match=r"engine\.quantization=int8.*engine\.deterministic=true.*accepted"):
        load_engine(moe_checkpoint, {"engine.quantization": "int8", "engine.deterministic": "true"})


def test_it_is_refused_on_a_cpu_whose_sums_would_saturate(
    moe_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    with pytest.raises(CapabilityError, match=r"engine\.quantization=int8: .*AVX-512 VNNI.*quantization=none"):
        load_engine(moe_checkpoint, {"engine.quantization": "int8"})
