from __future__ import annotations

import pytest

from engine.checkpoint.model_config import ModelConfig
from tests.benchmarks.peers.arithmetic import Arithmetic
from tests.benchmarks.peers.checkpoints import MODELS
from tests.benchmarks.peers.floor import Floor
from tests.benchmarks.peers.machine_rates import MachineRates
from tests.benchmarks.peers.model_cost import ModelCost, Product
from tests.benchmarks.peers.workload import WORKLOADS, Workload

TINY = Workload("tiny", "dense", num_groups=2, prefix_tokens=3, own_tokens=2, num_requests=4, max_tokens=3)
FLOAT32 = ("float32", "float32")


def _cost(model: str) -> ModelCost:
    family, shape = MODELS[model]
    return ModelCost.of(ModelConfig.from_hf({"model_type": family, "rms_norm_eps": 1e-6, "rope_theta": 1e6, **shape}))


DENSE, MOE = _cost("dense"), _cost("moe")


def test_the_models_have_the_weights_they_are_said_to_have() -> None:
    norms_and_embedding = 0.1e6
    assert DENSE.weights_read(10_000) == pytest.approx(159e6, abs=1e6 + norms_and_embedding)
    embedding = 32768 * 512  # read a row at a time
    assert MOE.weights_read(10_000) + embedding == pytest.approx(190e6, abs=1e6 + norms_and_embedding)


def test_one_token_reads_only_the_experts_it_chooses() -> None:
    experts = 8 * 32 * 3 * 512 * 384
    assert MOE.weights_read(10_000) - MOE.weights_read(1) == pytest.approx(experts * (1 - 4 / 32))
    assert DENSE.weights_read(1) == DENSE.weights_read(10_000)


def test_arithmetic_is_what_counting_token_by_token_gives() -> None:
    cost = ModelCost((Product(5, 7, 1, 1),), Product(11, 7, 1, 1), 13, 2, 0, 0)
    products = pairs = 0
    for _group in range(2):
        for position in range(3):
            products, pairs = products + 2 * 5 * 7, pairs + position + 1
    for _request in range(4):
        for position in range(3, 3 + 2 + 2):  # two of its own, and two more that it generated
            products, pairs = products + 2 * 5 * 7, pairs + position + 1
        products += 3 * 2 * 11 * 7  # three tokens sampled
    assert Arithmetic(TINY, cost).total() == (products, pairs * 13)


def test_an_unshared_workload_computes_every_token() -> None:
    assert WORKLOADS["dense-unshared"].num_prefill_tokens == 64 * 448
    assert WORKLOADS["dense-shared"].num_prefill_tokens == 4 * 384 + 64 * 64


def test_the_floor_is_arithmetic_where_memory_is_fast_and_reading_where_it_is_slow() -> None:
    flop = Arithmetic(TINY, DENSE).total()
    fast = Floor.of(TINY, DENSE, MachineRates({"float32": 1e9}, 1e30), FLOAT32)
    assert fast.total_s == pytest.approx((flop.products + flop.attention) / 1e9)
    slow = Floor.of(TINY, DENSE, MachineRates({"float32": 1e30}, 1e9), FLOAT32)
    kv = 2 * 8 * 128 * 8 * ((2 * 3 + 4 * 3) + (2 * 3 + 4 * 4))  # elements a token, tokens in both decode steps
    assert slow.total_s == pytest.approx((3 * DENSE.weights_read(4) + kv) * 4 / 1e9)


def test_int8_weights_speed_up_the_products_but_not_attention() -> None:
    rates = MachineRates({"float32": 1e9, "int8": 4e9}, 1e30)
    flop = Arithmetic(TINY, DENSE).total()
    floor = Floor.of(TINY, DENSE, rates, ("float32", "int8"))
    assert floor.total_s == pytest.approx(flop.products / 4e9 + flop.attention / 1e9)


def test_rates_are_measured_and_the_better_of_two_counts() -> None:
    rates = MachineRates.measure([Product(64, 64, 1, 1)], 1, ("float32", "int8"))
    assert set(rates.flop_per_s) == {"float32", "int8"}
    assert 1e8 < rates.flop_per_s["float32"] < 1e13
    assert 1e8 < rates.read_bytes_per_s < 1e13
    better = rates.best_of(MachineRates(dict.fromkeys(rates.flop_per_s, 1000000000000000.0), 1.0))
    assert better == MachineRates(dict.fromkeys(rates.flop_per_s, 1000000000000000.0), rates.read_bytes_per_s)
