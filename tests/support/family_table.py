"""Which families do what: a table whose cells are the tests that run, or the reason why there is none.

A column is a test, parametrised by `shows` over every family but those that the column has a reason for, which
tests/models/test_families.py checks in turn. A family that is new in engine/checkpoint/families.py runs in all of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from engine.checkpoint.families import DECODERS, ENCODERS

# What people call the models of each; a family without one fails.
MODELS = {
    "llama": "Llama 2 and 3",
    "qwen2": "Qwen2 and 2.5",
    "qwen2_moe": "Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mistral": "Mistral",
    "mixtral": "Mixtral",
    "phi3": "Phi-4 and Phi-4-mini",
    "smollm3": "SmolLM3",
    "granite": "Granite 3",
    "granitemoe": "GraniteMoE",
    "granitemoeshared": "GraniteMoE with a shared expert",
    "olmo2": "OLMo 2",
    "glm4_moe": "GLM-4.5",
    "olmo3": "OLMo 3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3 (text)",
    "gpt_oss": "gpt-oss",
    "bert": "BERT",
    "roberta": "RoBERTa",
    "xlm-roberta": "XLM-RoBERTa",
    "modernbert": "ModernBERT",
    "nomic_bert": "Nomic's BERT",
}
_OF_DECODERS, _OF_KERNELS = "tests.models.test_families", "tests.kernels"
NO_HEAD = "transformers has no class of this family with a head of classes, so no file has one"
NO_TOKENS = "an encoder generates nothing: this is refused"
NO_KV = "an encoder sees a whole input at once and keeps no keys and values"
NOT_ENCODERS = "not available for an encoder: this is refused"
NO_KERNELS = "PyTorch computes encoders on a GPU too: no Triton kernel is launched"


@dataclass(frozen=True)
class Column:
    """A thing that a family does or does not do."""

    title: str
    module: str  # of the test that shows it
    test: str
    without: Mapping[str, str] = field(default_factory=dict)  # family -> why it does not


COLUMNS = {
    "loads": Column("loads", _OF_DECODERS, "test_loads_all_that_is_stored"),
    "generates": Column(
        "generates", _OF_DECODERS, "test_generates_what_transformers_does", dict.fromkeys(ENCODERS, NO_TOKENS)
    ),
    "embeds": Column("embeds", _OF_DECODERS, "test_embeds_as_transformers_does"),
    "classifies": Column(
        "scores classes",
        _OF_DECODERS,
        "test_scores_classes_as_transformers_does",
        dict.fromkeys(("granite", "granitemoe", "granitemoeshared", "glm4_moe"), NO_HEAD),
    ),
    "prefix cache": Column(
        "prefix cache", _OF_DECODERS, "test_prefix_hits_change_nothing", dict.fromkeys(ENCODERS, NO_KV)
    ),
    "deterministic": Column(
        "deterministic",
        _OF_DECODERS,
        "test_deterministic_answers_depend_on_no_other",
        dict.fromkeys(ENCODERS, NOT_ENCODERS),
    ),
    "int8": Column("int8 at load", _OF_DECODERS, "test_int8_at_load", dict.fromkeys(ENCODERS, NOT_ENCODERS)),
    "int4": Column("int4 at load", _OF_DECODERS, "test_int4_at_load", dict.fromkeys(ENCODERS, NOT_ENCODERS)),
    "triton": Column(
        "Triton, interpreted",
        f"{_OF_KERNELS}.triton.test_families",
        "test_logits_are_the_references",
        dict.fromkeys(ENCODERS, NO_KERNELS),
    ),
    "aot": Column(
        "Triton, compiled ahead",
        f"{_OF_KERNELS}.aot.test_families",
        "test_every_launch_compiles",
        dict.fromkeys(ENCODERS, NO_KERNELS),
    ),
}


def families_of(column: str) -> list[str]:
    """The families that a column's test is run for: all without a reason not to."""
    return [family for family in (*DECODERS, *ENCODERS) if family not in COLUMNS[column].without]


def shows(column: str) -> pytest.MarkDecorator:
    """Marks the test of a column, which takes a `family`."""
    return pytest.mark.parametrize("family", families_of(column))


def gaps() -> list[tuple[str, str]]:
    """(column, family) of each reason."""
    return [(name, family) for name, column in COLUMNS.items() for family in column.without]


def shown(column: str) -> frozenset[str]:
    """The families that a column's test is in truth parametrised over, by its marks.

    Raises LookupError where there is no such test.
    """
    named = COLUMNS[column]
    test = getattr(importlib.import_module(named.module), named.test, None)
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize" and mark.args[0] == "family":
            return frozenset(mark.args[1])
    raise LookupError(f"{named.module}: no test {named.test} of a family")


def reason(column: str, family: str) -> str | None:
    """Why a cell is empty; None: its test runs. Raises LookupError for one with neither, or with both."""
    why, runs = COLUMNS[column].without.get(family), family in shown(column)
    if runs == (why is not None):
        raise LookupError(f"{family}, {column}: {'a test and a reason' if runs else 'neither a test nor a reason'}")
    return why
