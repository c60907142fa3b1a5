"""worker/OPERATIONS.md is true where a machine can tell beyond names and links."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from engine.kv_cache.tensors import KVCacheSpec
from tests.pages.markdown import Markdown
from tests.support.promql import alert_rules

PAGE = Path(__file__).resolve().parents[2] / "worker" / "OPERATIONS.md"
KV_ROW = re.compile(r"^\| \S+ \((\d+)[^,]*, (\d+)[^)]* of (\d+)\) \| [^|]+ \| (\d+) KiB \| ([\d,]+) \|$", re.MULTILINE)


def test_every_alert_has_an_entry() -> None:
    anchors = Markdown(PAGE.read_text()).anchors
    runbooks = {rule["annotations"]["runbook"] for rule in alert_rules()}
    assert len(runbooks) > 5
    assert {runbook for runbook in runbooks if runbook.partition("#")[2] not in anchors} == set()


def test_the_table_of_kv_sizes_is_what_the_engine_computes() -> None:
    rows = KV_ROW.findall(PAGE.read_text())
    assert len(rows) == 4
    for layers, kv_heads, head_dim, kib, tokens in rows:
        spec = KVCacheSpec(int(layers), 16, int(kv_heads), int(head_dim), torch.bfloat16)
        assert spec.bytes_per_token == int(kib) * 1024
        assert abs(8 * 2**30 // spec.bytes_per_token - int(tokens.replace(",", ""))) < 100
