"""From settings to an engine that is warmed up: which steps are run, and that nothing is compiled after them."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

import kernels.triton
from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.errors import NonFiniteLogits
from engine.loading.load import give_back_freed_memory, load_engine
from engine.loading.warm_up import compiling_steps, first_of_each, largest_steps
from engine.request import Request
from engine.sampling_params import SamplingParams
from settings import EffectiveSettings, EngineSettings, SettingsError, load_settings
from tests.support.compiled_kernels import on_a_new_device, recorded_specialisations
from tests.support.devices import simulated_device
from tests.support.engines import load_engine as load_decoder
from tests.support.engines import run_all
from tests.support.tiny_checkpoint import make_bert_checkpoint, make_checkpoint
from tests.support.tiny_families import Family

KINDS: list[tuple[Callable[[Path], Path], type, str]] = [
    (make_checkpoint, Engine, "model.embed_tokens.weight"),
    (make_bert_checkpoint, EncoderEngine, "embeddings.word_embeddings.weight"),
]

SETTINGS = {
    "engine.dtype": "bfloat16",
    "engine.max_num_seqs": "12",
    "engine.max_num_batched_tokens": "700",
    "engine.kv_cache.num_blocks": "250",
    "engine.native_kernels": "off",
}
# As many as Qwen3-30B-A3B has, for which the launches were tuned.
EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 16}


def _settings(**model: object) -> EffectiveSettings:
    values = {f"model.{key}": str(value) for key, value in model.items()}
    values |= {"engine.device": "cpu", "engine.num_threads": "1", "engine.kv_cache.num_blocks": "32"}
    return load_settings(values, environ={}, dotenv_path=Path(os.devnull))


@pytest.mark.parametrize(("make", "kind", "words"), KINDS)
def test_a_model_whose_first_token_is_not_finite_is_not_handed_out(
    tmp_path: Path, make: Callable[[Path], Path], kind: type, words: str
) -> None:
    path = make(tmp_path)
    assert isinstance(load_engine(_settings(path=path)), kind)
    tensors = load_file(path / "model.safetensors")
    tensors[words][0] = torch.nan  # of the warm-up token
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NonFiniteLogits):
        load_engine(_settings(path=path))


@pytest.mark.parametrize(("make", "kind", "words"), KINDS)
def test_the_models_configuration_is_derived_from_once(
    tmp_path: Path, make: Callable[[Path], Path], kind: type, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(tmp_path)
    read, seen = Path.read_text, []

    def read_and_count(self: Path, encoding: str | None = None, errors: str | None = None) -> str:
        seen.append(self.relative_to(path).as_posix() if self.is_relative_to(path) else "")
        return read(self, encoding, errors)

    monkeypatch.setattr(Path, "read_text", read_and_count)
    load_engine(_settings(path=path))
    assert seen.count("config.json") == 2  # what the model is, and how its vectors may be cut


def test_a_path_out_of_the_root_is_a_fault_of_the_settings(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    with pytest.raises(SettingsError, match=r"model\.path"):
        load_engine(_settings(path=make_checkpoint(tmp_path / "elsewhere"), root=tmp_path / "root"))


def _request(rng: random.Random, number: int, prefix: list[int]) -> Request:
    prompt = [rng.randrange(3, 300) for _ in range(rng.choice([1, 2, 3, 17, 60, 250, 900]))]
    params = SamplingParams(
        max_tokens=rng.choice([1, 2, 5]),
        temperature=rng.choice([0.0, 0.8]),
        top_k=rng.choice([0, 20]),
        top_p=rng.choice([1.0, 0.9]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        logprobs=rng.choice([None, 3]),
        prompt_logprobs=rng.choice([None, None, 3]),
        ignore_eos=True,
    )
    return Request(f"r{number}", tuple([*rng.choice([[], prefix]), *prompt][:1000]), params)


@pytest.mark.parametrize(("family", "shape", "shares"), [("llama", {}, "off"), ("qwen3_moe", EXPERTS, "on")])
def test_no_job_leads_to_a_compilation_after_the_warm_up(
    family: Family, shape: dict[str, Any], shares: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_checkpoint(tmp_path, family, num_hidden_layers=1, **shape)
    monkeypatch.setattr("engine.models.placement.operations", lambda _: kernels.triton)
    rng = random.Random(7)
    prefix = [rng.randrange(3, 300) for _ in range(64)]
    with recorded_specialisations(90) as compiled:
        with simulated_device(1 << 33):
            engine = load_decoder(tmp_path, SETTINGS | {"engine.shared_prefix.enabled": shares})
        warmed_up = list(compiled)
        assert len(warmed_up) == len(set(warmed_up)) >= 15
        run_all(engine, [_request(rng, number, prefix) for number in range(40)])
    assert compiled == warmed_up


class _Stopped(Exception):
    """The warm-up would launch its first kernel now."""


def test_the_warm_up_notes_every_kernel_before_it_launches_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", num_hidden_layers=1, **EXPERTS)
    monkeypatch.setattr("engine.models.placement.operations", lambda _: kernels.triton)
    with recorded_specialisations(90) as needed, simulated_device(1 << 33):
        load_decoder(tmp_path, SETTINGS)
    noted: list[str] = []

    def is_cached(launch: tuple[Any, Any]) -> bool:
        noted.append(launch[0].__name__)
        return True  # or processes would compile it

    monkeypatch.setattr("kernels.triton.compilation._is_cached", is_cached)
    monkeypatch.setattr("engine.loading.warm_up._steps_bytes", mock.Mock(side_effect=_Stopped))
    with on_a_new_device(90), simulated_device(1 << 33), pytest.raises(_Stopped):
        load_decoder(tmp_path, SETTINGS)
    assert sorted(noted) == sorted(name.partition(" ")[0] for name in needed)


def _engine_settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate({"max_num_seqs": 4, "max_num_batched_tokens": 100, **values})


def test_the_largest_steps_are_full_of_tokens_of_sequences_and_of_keys() -> None:
    mixed, chunks, decode = (step.rows for step in largest_steps(_engine_settings(), 1000))
    assert mixed == ((1, 1000),) * 3 + ((97, 1000),)
    assert chunks == ((100, 1000),)
    assert decode == ((1, 1000),) * 4


def test_a_short_context_takes_several_chunks_but_no_more_than_can_run() -> None:
    _, chunks, _ = largest_steps(_engine_settings(), 30)
    assert chunks.rows == ((30, 30), (30, 30), (30, 30), (10, 30))
    _, chunks, _ = largest_steps(_engine_settings(max_num_batched_tokens=1000), 30)
    assert chunks.rows == ((30, 30),) * 4


def test_each_class_of_tokens_is_run_once_where_it_begins() -> None:
    assert first_of_each(lambda tokens: tokens > 64, 100) == [1, 65]
    assert first_of_each(lambda tokens: tokens % 3 == 0, 2) == [1]
    rows = [step.rows for step in compiling_steps(_engine_settings(), 1000, lambda tokens: tokens > 64)]
    alone, beside_a_chunk = [((1, 2),), ((1, 1000),)], [((1, 2), (2, 1000)), ((1, 1000), (2, 1000))]
    assert rows == [*alone, *beside_a_chunk, ((1, 1000),), ((65, 1000),)]


@pytest.mark.parametrize(
    ("values", "tokens"),
    [({"max_num_seqs": 1}, 9), ({"max_num_seqs": 2, "max_num_batched_tokens": 2}, 9), ({}, 1)],
)
def test_no_decode_row_is_run_beside_a_chunk_that_cannot_be(values: dict[str, object], tokens: int) -> None:
    steps = compiling_steps(_engine_settings(**values), tokens, lambda _: 0)
    assert all(len(step.rows) == 1 for step in steps)


def test_groups_of_rows_double_where_prefixes_are_shared() -> None:
    steps = compiling_steps(_engine_settings(shared_prefix={"enabled": True}), 1000, lambda _: 0)
    shared = [step.rows for step in steps if step.shares_prefix]
    assert [len(rows) for rows in shared] == [2, 2, 2, 4, 4, 4]
    assert {rows[0][0] for rows in shared} == {1, 2, 25, 50}


def test_rows_read_and_write_one_block_whatever_their_length() -> None:
    (mixed, _, _) = largest_steps(_engine_settings(), 1000)
    items = mixed.items(16, generates=True)
    assert [len(item.token_ids) for item in items] == [1, 1, 1, 97]
    assert {tuple(item.block_table) for item in items} == {(1,) * 63}
    assert [item.wants_hidden for item in items] == [False, False, False, True]
    assert all(item.wants_logits for item in items)
    assert not any(item.wants_logits for item in mixed.items(16, generates=False))


def test_what_was_freed_goes_back_to_the_system() -> None:
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "malloc_trim"):
        pytest.skip("no glibc")
    libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )
    pieces = [libc.malloc(4096) for _ in range(20_000)]
    for piece in pieces:
        ctypes.memset(piece, 1, 4096)
    # The last one stays, so that the heap does not end before what is freed.
    for piece in pieces[:-1]:
        libc.free(piece)
    before = _resident_bytes()

    give_back_freed_memory()

    assert before - _resident_bytes() > 40 << 20  # of 82 MB
    libc.free(pieces[-1])


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
