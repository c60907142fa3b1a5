"""The engine against transformers in float32, for each family and each way a prompt can be run.

`make slow` runs them for every variant of every family.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.engine import Engine
from engine.model_interface import LogitsResult
from engine.text.tokenizer import Tokenizer
from tests.conftest import TIES
from tests.support.engines import greedy_request, load_engine, run_all, tokens_of
from tests.support.tensors import native_variants
from tests.support.tiny_checkpoint import (
    VOCAB_SIZE,
    ReferenceContinuation,
    continue_greedily,
    count_ties_where_it_differs,
    make_checkpoint,
)
from tests.support.tiny_families import Family

NUM_TOKENS = 64
LOGITS_TOLERANCE = 1e-4  # float32 over two or three layers: observed below 2e-5
PROMPT_LENGTHS = (5, 16, 33, 50)


def longrope(num_rotated: int) -> dict[str, Any]:
    """Of heads of 16 dimensions, so many of which are rotated."""
    factors = [1.0 + 0.5 * pair for pair in range(num_rotated // 2)]
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": num_rotated / 16,
        "short_factor": factors,
        "long_factor": [3.0 * factor for factor in factors],
    }


# The context before scaling: longer than every sequence, and shorter than every prompt.
BEFORE = {"original_max_position_embeddings": 512, "max_position_embeddings": 512}
SHORT = {"original_max_position_embeddings": 4}

VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen3-mha-tied": ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3-gqa7-untied": ("qwen3", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24}),
    "llama-gqa4-llama3-rope": ("llama", {"num_attention_heads": 8, "num_key_value_heads": 2}),
    "llama-tied-sharded": ("llama", {"tie_word_embeddings": True, "max_shard_size": "40KB", "num_hidden_layers": 3}),
    "moe-top1": ("qwen3_moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "moe-top5-mixed-layers-sharded": (
        "qwen3_moe",
        {"num_experts_per_tok": 5, "mlp_only_layers": [1], "num_hidden_layers": 3, "max_shard_size": "60KB"},
    ),
    "moe-every-second-layer-tied": (
        "qwen3_moe",
        {"decoder_sparse_step": 2, "num_hidden_layers": 3, "tie_word_embeddings": True, "head_dim": 40},
    ),
    "qwen2-gqa2": ("qwen2", {}),
    "mistral-head-of-24": ("mistral", {"head_dim": 24}),
    "mistral-window": ("mistral", {"sliding_window": 21, "num_hidden_layers": 3}),
    "mixtral-top2": ("mixtral", {}),
    "phi3-gqa4": ("phi3", {"num_key_value_heads": 1}),
    "phi3-three-quarters-rotated": ("phi3", {"num_key_value_heads": 2, "rope_parameters": longrope(12), **BEFORE}),
    "smollm3-tied": ("smollm3", {"num_hidden_layers": 4, "tie_word_embeddings": True}),
    "granite-gqa2": ("granite", {}),
    "olmo2-gqa2": ("olmo2", {}),
    "qwen2_moe-mixed-layers": ("qwen2_moe", {"mlp_only_layers": [1], "num_hidden_layers": 3}),
    "granitemoe-top2": ("granitemoe", {}),
    "granitemoeshared-top2": ("granitemoeshared", {}),
    "glm4_moe-groups": ("glm4_moe", {"use_qk_norm": True}),
    "olmo3-gqa2": ("olmo3", {"num_hidden_layers": 3}),
    "gemma2-gqa2": ("gemma2", {"num_hidden_layers": 3}),
    "gemma3-gqa2": ("gemma3_text", {"num_hidden_layers": 3}),
    "gpt_oss-gqa2": ("gpt_oss", {"num_hidden_layers": 3}),
}
CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
SWITCHED = {"use_sliding_window": True, "sliding_window": 21}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
# More of these families, by `make slow` alone.
MORE_VARIANTS: dict[str, tuple[Family, dict[str, Any]]] = {
    "qwen2-tied-sharded": ("qwen2", {"tie_word_embeddings": True, "max_shard_size": "40KB", "num_hidden_layers": 3}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama-linear-rope": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}}),
    "qwen2-gqa7": ("qwen2", {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24}),
    "mistral-window-of-one-block": ("mistral", {"sliding_window": 16, "num_key_value_heads": 1}),
    "mixtral-window": ("mixtral", {"sliding_window": 9}),
    "phi3-window": ("phi3", {"sliding_window": 30, "num_key_value_heads": 2}),
    "qwen2-upper-windows": ("qwen2", {**SWITCHED, "max_window_layers": 1, "num_hidden_layers": 3}),
    "qwen3-alternating-windows": (
        "qwen3",
        {**SWITCHED, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    ),
    "mistral-mha-tied": ("mistral", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "mistral-gqa8-sharded": ("mistral", {"num_attention_heads": 8, "num_key_value_heads": 1, "max_shard_size": "40KB"}),
    "mixtral-top3-of-5-sharded": (
        "mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 3, "num_hidden_layers": 3, "max_shard_size": "60KB"},
    ),
    "mixtral-top1-tied": ("mixtral", {"num_experts_per_tok": 1, "tie_word_embeddings": True, "head_dim": 40}),
    "phi3-mha": ("phi3", {"num_key_value_heads": 4}),
    "phi3-longrope-beyond-its-context": ("phi3", {"num_key_value_heads": 2, "rope_parameters": longrope(16), **SHORT}),
    "phi3-tied-sharded": ("phi3", {"tie_word_embeddings": True, "max_shard_size": "40KB", "num_hidden_layers": 3}),
    "smollm3-every-second-layer": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2}),
    "smollm3-no-layer-rotated": ("smollm3", {"no_rope_layers": [0, 0, 0], "num_hidden_layers": 3}),
    "olmo2-mha-sharded": ("olmo2", {"num_key_value_heads": 4, "max_shard_size": "40KB", "num_hidden_layers": 3}),
    "olmo2-gqa7-tied": (
        "olmo2",
        {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "olmo3-mha-sharded": ("olmo3", {"num_key_value_heads": 4, "max_shard_size": "40KB", "sliding_window": 16}),
    "olmo3-all-windows": ("olmo3", {"layer_types": ["sliding_attention"] * 2, "num_key_value_heads": 1}),
    "gemma2-tied-without-caps": ("gemma2", {"tie_word_embeddings": True, **dict.fromkeys(CAPS), "sliding_window": 16}),
    "gemma2-all-windows-gqa8": (
        "gemma2",
        {"layer_types": ["sliding_attention"] * 2, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24},
    ),
    "gpt_oss-gqa8-top1-sharded": (
        "gpt_oss",
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_experts_per_tok": 1,
            "max_shard_size": "60KB",
            "sliding_window": 16,
        },
    ),
    "gpt_oss-all-windows-mha": ("gpt_oss", {"num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 2}),
    "gemma3-tied-sharded": ("gemma3_text", {"tie_word_embeddings": True, "max_shard_size": "40KB"}),
    "gemma3-capped-gqa8": (  # logits alone: transformers' attention for this family leaves out the other cap
        "gemma3_text",
        {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 24, CAPS[1]: 4.0},
    ),
    "granite-tied-sharded": ("granite", {"tie_word_embeddings": True, "max_shard_size": "40KB"}),
    "qwen2_moe-top5-not-renormalised": ("qwen2_moe", {"num_experts_per_tok": 5, "norm_topk_prob": False}),
    "qwen2_moe-without-bias-tied-sharded": (
        "qwen2_moe",
        {"qkv_bias": False, "tie_word_embeddings": True, "decoder_sparse_step": 2, "max_shard_size": "60KB"},
    ),
    "granitemoe-top1-tied": ("granitemoe", {"num_experts_per_tok": 1, "tie_word_embeddings": True}),
    "granitemoe-top4-of-5-sharded": (
        "granitemoe",
        {"num_local_experts": 5, "num_experts_per_tok": 4, "max_shard_size": "60KB", "residual_multiplier": 1.0},
    ),
    "granitemoeshared-none": ("granitemoeshared", {"shared_intermediate_size": 0}),
    "granitemoeshared-wide-sharded": (
        "granitemoeshared",
        {"shared_intermediate_size": 200, "num_key_value_heads": 4, "max_shard_size": "60KB"},
    ),
    "glm4_moe-one-group-of-few": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "attention_bias": False, "n_shared_experts": 2, "num_hidden_layers": 3},
    ),
    "glm4_moe-not-renormalised-sharded": (
        "glm4_moe",
        {"norm_topk_prob": False, "first_k_dense_replace": 0, "max_shard_size": "60KB", "num_key_value_heads": 1},
    ),
    "granite-one-left-out": ("granite", {"residual_multiplier": 1.0, "attention_multiplier": 1.0}),
}
_OTHERS = [pytest.param(variant, marks=pytest.mark.slow) for variant in MORE_VARIANTS]


class Case:
    """A checkpoint, 32 prompts of which some share prefixes, and what transformers makes of them."""

    def __init__(self, path: Path, family: Family, options: dict[str, Any], account: dict[str, int]) -> None:
        self._account = account
        self.path = make_checkpoint(path, family, **options)
        rng = random.Random(len(options))
        shared = [rng.randrange(256) for _ in range(40)]
        self.prompts: list[list[int]] = []
        for number in range(32):
            length = PROMPT_LENGTHS[number % len(PROMPT_LENGTHS)]
            own = [rng.randrange(256) for _ in range(length)]
            self.prompts.append([*shared, *own][:length] if number % 3 == 0 else own)
        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32).eval()
        self.expected: list[ReferenceContinuation] = continue_greedily(
            model, self.prompts, NUM_TOKENS, suppressed=Tokenizer.from_directory(path).unknown_ids(VOCAB_SIZE)
        )

    def engine(self, **overrides: object) -> Engine:
        return load_engine(self.path, {key.replace("__", "."): value for key, value in overrides.items()})

    def run(self, engine: Engine, indices: Sequence[int] = range(32)) -> None:
        """Run prompts together and compare their continuations."""
        outputs = run_all(engine, [greedy_request(str(i), self.prompts[i], NUM_TOKENS) for i in indices])
        ties = sum(count_ties_where_it_differs(self.expected[i], tokens_of(outputs[str(i)])) for i in indices)
        self._account["continuations"] += len(indices)
        self._account["tokens"] += len(indices) * NUM_TOKENS
        self._account["ties"] += ties


@pytest.fixture(scope="module", params=[*VARIANTS, *_OTHERS])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, options = (VARIANTS | MORE_VARIANTS)[request.param]
    path = tmp_path_factory.mktemp("checkpoint") / request.param
    return Case(path, family, options, request.config.stash[TIES])


def by_default_on(*variants: str) -> pytest.MarkDecorator:
    """A way of running is tried on these variants; on the others by `make slow`."""
    assert set(variants) <= VARIANTS.keys()
    params = [pytest.param(v, marks=[] if v in variants else pytest.mark.slow) for v in (*VARIANTS, *MORE_VARIANTS)]
    return pytest.mark.parametrize("case", params, indirect=True)


def test_logits_of_prefill_and_of_every_decode_are_transformers(case: Case) -> None:
    interface = case.engine().model_interface
    for index in range(len(PROMPT_LENGTHS)):
        name, prompt, expected = f"p{index}", case.prompts[index], case.expected[index]
        result = interface.prefill(name, prompt)
        for step, token_id in enumerate(expected.token_ids):
            assert isinstance(result, LogitsResult)
            torch.testing.assert_close(result.logits, expected.logits[step], atol=LOGITS_TOLERANCE, rtol=0)
            result = interface.decode(name, token_id, len(prompt) + step)
        interface.release(name)


@by_default_on("qwen3-gqa7-untied", "llama-tied-sharded", "moe-top1", "granite-gqa2")
def test_alone(case: Case) -> None:
    engine = case.engine()
    for index in (0, 1, 2, 3):
        case.run(engine, [index])


# Everywhere else the engine takes the fastest variant that the machine runs.
@pytest.mark.parametrize("native", ["off", *(pytest.param(v, marks=pytest.mark.slow) for v in native_variants())])
def test_with_31_others(case: Case, native: str) -> None:
    case.run(case.engine(engine__native_kernels=native))


@pytest.mark.parametrize("native", native_variants())
@by_default_on("qwen3-gqa7-untied", "llama-gqa4-llama3-rope", "moe-top5-mixed-layers-sharded", "qwen2-gqa2")
def test_every_native_variant_gives_pytorchs_logits_in_bfloat16(case: Case, native: str) -> None:
    ours, pytorchs = (
        case.engine(engine__dtype="bfloat16", engine__native_kernels=kernels).model_interface
        for kernels in (native, "off")
    )
    for name, prompt in enumerate(case.prompts[:4]):
        actual, expected = (interface.prefill(str(name), prompt) for interface in (ours, pytorchs))
        assert isinstance(actual, LogitsResult)
        assert isinstance(expected, LogitsResult)
        steps = 32 * torch.finfo(torch.bfloat16).eps
        torch.testing.assert_close(actual.logits, expected.logits, atol=steps * float(expected.logits.std()), rtol=0)


@by_default_on(
    "qwen3-gqa7-untied", "llama-gqa4-llama3-rope", "moe-top5-mixed-layers-sharded", "smollm3-tied", "gemma3-gqa2"
)
def test_in_chunks_of_seven(case: Case) -> None:
    case.run(case.engine(engine__max_num_batched_tokens="7", engine__max_num_seqs="7"), range(16))


@by_default_on("qwen3-mha-tied", "llama-tied-sharded", "moe-every-second-layer-tied")
def test_in_chunks_of_exactly_seven(case: Case) -> None:
    engine = case.engine(engine__max_num_batched_tokens="7", engine__max_num_seqs="7", engine__unified_prefill="false")
    case.run(engine, [3, 7, 11])
    assert engine.stats().num_steps >= 3 * (50 // 7)


@by_default_on("qwen3-mha-tied", "llama-gqa4-llama3-rope", "moe-top1")
def test_prefill_and_decode_apart(case: Case) -> None:
    case.run(case.engine(engine__unified_prefill="false"))


@by_default_on("qwen3-mha-tied", "llama-tied-sharded", "moe-top5-mixed-layers-sharded", "phi3-gqa4", "gpt_oss-gqa2")
def test_on_prefix_hits(case: Case) -> None:
    engine = case.engine(engine__deduplicate="false")  # some prompts are equal: all of a duplicate counts as cached
    case.run(engine)
    before = engine.stats().cached_tokens
    case.run(engine)
    assert engine.stats().cached_tokens - before == sum((len(p) - 1) // 16 * 16 for p in case.prompts)


@by_default_on("qwen3-gqa7-untied", "llama-gqa4-llama3-rope", "moe-every-second-layer-tied")
def test_without_the_prefix_cache(case: Case) -> None:
    engine = case.engine(engine__prefix_cache__enabled="false", engine__deduplicate="false")
    case.run(engine)
    assert engine.stats().cached_tokens == 0


def check_preempted(case: Case, prefix_cache: str) -> None:
    engine = case.engine(engine__kv_cache__num_blocks="40", engine__prefix_cache__enabled=prefix_cache)
    case.run(engine)
    assert engine.stats().num_preemptions > 0


@by_default_on("qwen3-mha-tied", "llama-gqa4-llama3-rope", "moe-top5-mixed-layers-sharded", "gemma2-gqa2")
def test_preempted_and_found_in_the_prefix_cache(case: Case) -> None:
    check_preempted(case, prefix_cache="true")


@by_default_on("qwen3-gqa7-untied", "llama-tied-sharded", "moe-top1", "mixtral-top2", "mistral-window")
def test_preempted_and_recomputed(case: Case) -> None:
    check_preempted(case, prefix_cache="false")


@by_default_on(
    "qwen3-gqa7-untied", "llama-tied-sharded", "moe-top5-mixed-layers-sharded", "mistral-head-of-24", "olmo3-gqa2"
)
def test_shared_prefixes_attended_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.execution.forward.DECODE_GATE", lambda num_rows, num_tokens: True)
    engine = case.engine(engine__shared_prefix__enabled="true")
    case.run(engine)
    case.run(engine)  # on prefix hits: chunks share prefixes too


@by_default_on("qwen3-mha-tied", "llama-gqa4-llama3-rope", "moe-every-second-layer-tied")
def test_shared_prefixes_attended_by_each(case: Case) -> None:
    engine = case.engine(engine__shared_prefix__enabled="false")
    case.run(engine)
    case.run(engine)


@by_default_on("qwen3-gqa7-untied", "llama-tied-sharded", "moe-every-second-layer-tied")
def test_after_idle(case: Case) -> None:
    engine = case.engine()
    case.run(engine, [0, 1])
    assert engine.step() == []
    assert not engine.has_unfinished()
    case.run(engine, [0, 1, 2])


@by_default_on("qwen3-mha-tied", "llama-gqa4-llama3-rope", "moe-every-second-layer-tied")
def test_one_sequence_at_a_time_and_experts_one_by_one(case: Case) -> None:
    case.run(case.engine(engine__decode__batched="false", engine__moe__bucketed="false"), range(8))


@by_default_on("moe-top1", "moe-top5-mixed-layers-sharded", "moe-every-second-layer-tied")
def test_every_expert_layer_bucketed(case: Case) -> None:
    case.run(case.engine(engine__moe__bucketed_min_tokens="1"), range(8))
