"""Ways to exchange gradients, by name, and what they do on paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.measured_costs import rehearse, small
from hvdtrain.core.gradients.plan import ParameterSpec
from hvdtrain.types import DType
from hvdtrain_bench.harness.settings import SHARDED, period_of
from hvdtrain_bench.scaling.scheme import Scheme

_MATRIX = (1024, 1024)
# What is sent depends a little on the number of nodes, into which small gradients are divided.
_LEAST_SHARE = 0.05


def measured_scheme(name: str, specs: Sequence[ParameterSpec]) -> Scheme:
    """Return what a scheme does on paper; exchanges of gradients are rehearsed (local)."""
    if name == SHARDED:
        return Scheme(name, sharded=True)
    if (period := period_of(name)) > 1:
        return Scheme(name, period=period)
    exchange, memory = make_exchange(name), Buffer.from_array(np.empty(0, np.float32))
    start = rehearse(exchange, small(specs[0]), memory, 2).seconds
    seconds, calls = 0.0, 1
    sent = {2: 0.0, 4: 0.0}
    one_of_each = {spec.shape: spec for spec in specs}
    for shape, count in Counter(spec.shape for spec in specs).items():
        for nodes in sent:
            found = rehearse(exchange, one_of_each[shape], memory, nodes)
            sent[nodes] += count * found.nbytes
            if nodes == 2:
                seconds += count * max(0.0, found.seconds - start)
                calls = max(calls, found.calls)
    total = sum(spec.nbytes for spec in specs)
    more = (sent[4] - sent[2]) / 2
    per_node = more / total if abs(more) > _LEAST_SHARE * sent[2] else 0.0
    return Scheme(
        name,
        rate=sent[2] / total - 2 * per_node,
        rate_per_node=per_node,
        calls=calls,
        bucket_seconds=start,
        seconds_per_byte=seconds / total,
    )


def scheme_of_any_model(name: str) -> Scheme:
    """Return the same for a model of which nothing is known: its parameters are large matrices."""
    spec = ParameterSpec("any", _MATRIX, (_MATRIX[1], 1), DType.FLOAT32, "float32", "cpu")
    return measured_scheme(name, [spec])
