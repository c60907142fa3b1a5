"""The least time that a workload can take on this machine."""

from __future__ import annotations

from dataclasses import dataclass

from tests.benchmarks.peers.arithmetic import Arithmetic, Flop
from tests.benchmarks.peers.machine_rates import MachineRates
from tests.benchmarks.peers.model_cost import ModelCost
from tests.benchmarks.peers.workload import Workload

FORMULA = """\
floor   = prefill + M - 1 decode steps, each the larger of its arithmetic and its reading:
          FLOP of products / rate + FLOP of attention / rate of the activations' type, and bytes / read bandwidth
prefill : 2 W T + 2 V H R + 4 L N D (pairs of a token and a key it sees) FLOP; T tokens, each shared prefix once;
          W weights that a token passes through; the head only for the R requests' last tokens. Bytes: weights, once
decode  : R (2 W + 2 V H) + 4 L N D (keys of all requests) FLOP a step. Bytes: weights (of experts those that R tokens
          choose) and 2 L N_kv D elements of KV a token, a shared prefix once per group
Norms, rotary, activations, sampling, writing to memory and scheduling count as nothing."""

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Floor:
    """Seconds, and what they come from."""

    prefill_s: float
    decode_s: float
    flop: Flop
    decode_bytes: float

    @property
    def total_s(self) -> float:
        """Prefill and decode."""
        return self.prefill_s + self.decode_s

    @classmethod
    def of(cls, workload: Workload, cost: ModelCost, rates: MachineRates, dtypes: tuple[str, str]) -> Floor:
        """`dtypes`: of activations and KV, and of weights (int8 or the same)."""
        dtype, weight_dtype = dtypes
        arithmetic = Arithmetic(workload, cost)

        def seconds(flop: Flop, num_bytes: float) -> float:
            products_s = flop.products / rates.flop_per_s[weight_dtype]
            attention_s = flop.attention / rates.flop_per_s[dtype]
            return max(products_s + attention_s, num_bytes / rates.read_bytes_per_s)

        weight_bytes = cost.weights_read(workload.num_requests) * BYTES[weight_dtype]
        prefill_bytes = cost.weights_read(workload.num_prefill_tokens) * BYTES[weight_dtype]
        decode_s = decode_bytes = 0.0
        for step in range(1, workload.max_tokens):
            keys = workload.num_groups * workload.prefix_tokens + workload.num_requests * (workload.own_tokens + step)
            num_bytes = weight_bytes + keys * cost.kv_elements_per_token * BYTES[dtype]
            decode_s += seconds(arithmetic.decode_step(step), num_bytes)
            decode_bytes += num_bytes
        return cls(seconds(arithmetic.prefill(), prefill_bytes), decode_s, arithmetic.total(), decode_bytes)
