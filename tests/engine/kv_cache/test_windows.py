"""Where every layer has a window, blocks that fell out of it are free while their sequence goes on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.kv_cache.block_manager import BlockManager
from engine.loading import load
from engine.text.tokenizer import Tokenizer
from tests.support.engines import OpenEngine, greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import TIE, VOCAB_SIZE, make_checkpoint

BLOCK = 16
PROMPT = [7 * i % 250 for i in range(40)]


def engine_of(path: Path, num_tokens: int) -> OpenEngine:
    num_blocks = str(num_tokens // BLOCK + 20)
    return load_engine(path, {"engine.kv_cache.num_blocks": num_blocks, "engine.decode.batched": "false"})


def used_blocks(engine: OpenEngine) -> int:
    return engine.parts.block_manager.metrics(0).used_blocks


def generated(engine: OpenEngine, num_tokens: int) -> tuple[list[int], int]:
    """A greedy continuation of 40 tokens, and the most blocks that were in use."""
    engine.add_request(greedy_request("a", PROMPT, num_tokens))
    most = 0
    while True:
        outputs = engine.step()
        most = max(most, used_blocks(engine))
        if outputs:
            return tokens_of(outputs[0]), most


def test_a_generation_keeps_its_window_and_answers_as_with_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_tokens, window = 700, 100
    shape = {"sliding_window": window, "num_hidden_layers": 2, "max_position_embeddings": num_tokens + 200}
    path = make_checkpoint(tmp_path, "mistral", **shape)
    tokens, most = generated(engine_of(path, num_tokens), num_tokens)
    # A window lies across a block more than it fills, and blocks are given back where one ends.
    assert most <= -(-window // BLOCK) + 2
    with monkeypatch.context() as patch:
        keeping = {"prefix_caching": True}
        patch.setattr(load, "BlockManager", lambda blocks, size, **_: BlockManager(blocks, size, **keeping))
        expected, all_blocks = generated(engine_of(path, num_tokens), num_tokens)
    print(f"{num_tokens} tokens, a window of {window}: {most} blocks of {BLOCK} tokens, {all_blocks} with all kept")
    assert all_blocks == -(-(num_tokens + 39) // BLOCK)
    assert tokens == expected


@pytest.mark.parametrize(
    ("num_tokens", "window"),
    [(600, 100), pytest.param(100_000, 1024, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
)
def test_a_long_generation_holds_its_window_and_is_right_at_sampled_places(
    num_tokens: int, window: int, tmp_path: Path
) -> None:
    # In one layer a token depends on the window before it alone, so transformers needs no more than that to judge it.
    shape = {"sliding_window": window, "num_hidden_layers": 1, "max_position_embeddings": num_tokens + 200}
    path = make_checkpoint(tmp_path, "mistral", **shape)
    tokens, most = generated(engine_of(path, num_tokens), num_tokens)
    whole = -(-(num_tokens + len(PROMPT) - 1) // BLOCK)
    print(f"{num_tokens} tokens, a window of {window}: {most} blocks of {BLOCK} tokens of {whole}")
    assert len(tokens) == num_tokens
    assert most <= -(-window // BLOCK) + 2
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    unknown = Tokenizer.from_directory(path).unknown_ids(VOCAB_SIZE)
    sequence = [*PROMPT, *tokens]
    # The last ones, and others over all the length, odd so that windows begin anywhere within a block.
    places = [*range(len(sequence) - 3, len(sequence)), *range(len(PROMPT), len(sequence), num_tokens // 17 | 1)]
    for place in places:
        positions = torch.arange(max(place - window, 0), place)
        with torch.no_grad():
            ids = torch.tensor(sequence)[None, positions]
            logits = model(ids, position_ids=positions[None], use_cache=False).logits[0, -1]
        logits[list(unknown)] = -torch.inf
        assert logits.max() - logits[sequence[place]] <= TIE, f"token {place}"


def test_what_fell_out_of_a_window_is_still_hit(tmp_path: Path) -> None:
    engine = load_engine(make_checkpoint(tmp_path, "mistral", sliding_window=30))
    prompt = [5 * i % 250 for i in range(200)]
    first = run_all(engine, [greedy_request("a", prompt, 40)])["a"]
    longer = [*prompt, *tokens_of(first)[:20]]
    second = run_all(engine, [greedy_request("b", longer, 20)])["b"]
    assert engine.stats().cached_tokens == (len(longer) - 1) // BLOCK * BLOCK
    assert tokens_of(second) == tokens_of(first)[20:]
    assert used_blocks(engine) == 0


def test_a_layer_without_a_window_keeps_all(tmp_path: Path) -> None:
    switched = {"use_sliding_window": True, "sliding_window": 30, "max_window_layers": 1}
    engine = load_engine(make_checkpoint(tmp_path, "qwen2", **switched))
    engine.add_request(greedy_request("a", range(200), 500))
    for _ in range(20):
        engine.step()
    assert used_blocks(engine) == -(-219 // BLOCK)


def test_a_hit_takes_the_blocks_that_its_next_token_sees() -> None:
    manager = BlockManager(20, 4, prefix_caching=True, kept_tokens=6)
    tokens = list(range(24))
    manager.open("a", manager.new_chain(tokens, ""), tokens)
    manager.commit("a", tokens, 15)
    manager.release_unseen("a", 15)  # token 15 sees tokens 10 to 15: blocks 0 and 1 are seen by none
    assert list(manager.block_table("a"))[:2] == [0, 0]
    assert all(manager.block_table("a")[2:])
    assert manager.metrics(0).used_blocks == 4
    manager.check_integrity()
    manager.release_unseen("a", 16)
    assert manager.metrics(0).used_blocks == 4
    assert manager.open("b", manager.new_chain(tokens, ""), tokens) == 12
    assert list(manager.block_table("b"))[:1] == [0]  # token 12 sees tokens 7 to 12
    manager.check_integrity()
    manager.discard("b")
    manager.free("a")
    manager.check_integrity()
    assert manager.metrics(0).used_blocks == 0
    assert manager.metrics(0).registered_blocks == 1  # what b held is withdrawn, block 0 it had given back
