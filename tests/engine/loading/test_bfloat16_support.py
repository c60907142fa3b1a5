from __future__ import annotations

import platform

import pytest
import torch

from engine.loading.derived_settings import computes_bfloat16


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
