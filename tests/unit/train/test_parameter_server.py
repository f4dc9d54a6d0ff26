"""Shards cover all parameters, and the protocol of a server keeps its promises in any order."""

from collections.abc import Sequence
from math import fsum

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.core.sharding.segments import Segment
from hvdtrain.errors import UsageError
from hvdtrain.train.parameter_server.protocol import (
    AsynchronousProtocol,
    Protocol,
    SynchronousProtocol,
    Update,
)
from hvdtrain.train.parameter_server.rounds import segments_in, shard_bounds
from hvdtrain.train.torch.served_loop import TorchShard, read_states, torch_row

ROUNDS = 6


@pytest.mark.parametrize(
    ("types", "got"),
    [
        ([], "no parameter"),
        ([torch.float32, torch.float64], "float32 and float64"),
        ([torch.bfloat16], "bfloat16"),
    ],
)
def test_parameters_are_of_one_type_that_servers_take(types: list[torch.dtype], got: str) -> None:
    given = [torch.nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in types]
    with pytest.raises(UsageError, match=f"of one type, float32 or float64, got {got}$"):
        torch_row(given)


@given(st.lists(st.integers(0, 400), min_size=1, max_size=6), st.integers(1, 5))
def test_the_pieces_of_all_shards_are_all_parameters(sizes: list[int], servers: int) -> None:
    starts = np.cumsum([0, *sizes])
    bounds = shard_bounds(sizes, servers)
    lengths = [end - begin for begin, end in bounds]
    assert len(lengths) == servers
    assert max(lengths) - min(lengths) < 128
    covered: list[int] = []
    for begin, end in bounds:
        shard: list[int] = []
        for piece in segments_in(sizes, (begin, end)):
            assert piece.start == len(shard)
            assert piece.first % 64 == 0
            assert piece.first + piece.count <= sizes[piece.parameter]
            first = int(starts[piece.parameter]) + piece.first
            shard += range(first, first + piece.count)
        assert shard == list(range(begin, end))
        covered += shard
    assert covered == list(range(sum(sizes)))


class Workers:
    """Workers that act in any order, and what they have seen of one server."""

    def __init__(self, protocol: Protocol, samples: Sequence[Sequence[int]]) -> None:
        self._protocol, self._samples = protocol, samples
        count = len(samples[0])
        self.rounds = [0] * count
        self.versions: list[int | None] = [None] * count  # of the weights of those that compute
        self.waiting: set[int] = set()
        self.updates: list[Update] = []
        self.leads: list[int] = []

    def able(self) -> list[int]:
        return [
            worker
            for worker, done in enumerate(self.rounds)
            if done < len(self._samples) and worker not in self.waiting
        ]

    def act(self, worker: int) -> None:
        samples, version = self._samples[self.rounds[worker]][worker], self.versions[worker]
        if version is None:
            self._protocol.pull(worker, samples)
            self.waiting.add(worker)
        else:
            update = self._protocol.push(worker, samples, version)
            self.updates += [update] if update is not None else []
            self.rounds[worker] += 1
            self.versions[worker] = None
        for answered, late in self._protocol.answers():
            self.waiting.remove(answered)
            if late:
                self.rounds[answered] += 1
            else:
                self.leads.append(self.rounds[answered] - min(self.rounds))
                self.versions[answered] = self._protocol.version

    def run(self, order: Sequence[int]) -> None:
        for number in order:
            able = self.able()
            if able:
                self.act(able[number % len(able)])
        while able := self.able():
            self.act(able[0])
        assert not self.waiting
        assert self.rounds == [len(self._samples)] * len(self.rounds)
        assert self._protocol.rounds_done == len(self._samples)


ORDERS = st.lists(st.integers(0, 11), max_size=80)
SAMPLES = st.integers(1, 4).flatmap(
    lambda workers: st.lists(
        st.lists(st.integers(0, 3), min_size=workers, max_size=workers), min_size=1, max_size=ROUNDS
    )
)


@given(SAMPLES, st.integers(0, 3), ORDERS)
def test_asynchronous_gradients_are_applied_once_and_not_too_stale(
    samples: list[list[int]], staleness: int, order: list[int]
) -> None:
    protocol = AsynchronousProtocol(len(samples[0]), staleness)
    workers = Workers(protocol, samples)
    workers.run(order)
    wanted = [(r, w, 1.0) for r, row in enumerate(samples) for w, n in enumerate(row) if n]
    got = [(one.round, w, factor) for one in workers.updates for w, factor in one.weights.items()]
    assert sorted(got) == wanted
    assert protocol.pushes.applied == protocol.version == len(wanted)
    assert protocol.pushes.dropped == 0
    assert max(workers.leads, default=0) <= staleness
    most = (len(samples[0]) - 1) * (2 * staleness + 1)
    assert all(0 <= stale <= most for stale in protocol.pushes.staleness)


@given(SAMPLES, st.integers(0, 3), ORDERS)
def test_synchronous_rounds_are_means_in_order(
    samples: list[list[int]], backup: int, order: list[int]
) -> None:
    count = len(samples[0])
    backup = min(backup, count - 1)
    protocol = SynchronousProtocol(count, backup)
    workers = Workers(protocol, samples)
    workers.run(order)
    numbers = [update.round for update in workers.updates]
    assert numbers == sorted(set(numbers))
    for update in workers.updates:
        row = [samples[update.round][worker] for worker in update.weights]
        assert all(row)
        assert list(update.weights.values()) == [samples_of / sum(row) for samples_of in row]
        assert fsum(update.weights.values()) == pytest.approx(1)
    pushed = sum(1 for row in samples for one in row if one)
    used = sum(len(update.weights) for update in workers.updates)
    assert protocol.pushes.applied == used
    assert protocol.pushes.dropped == pushed - used
    if not backup:
        assert numbers == [r for r, row in enumerate(samples) if any(row)]
        assert used == pushed


@pytest.mark.parametrize("name", ["SGD", "Adam", "NAdam", "ASGD"])
def test_a_shard_takes_the_state_of_a_scalar_parameter(name: str) -> None:
    kind, options = getattr(torch.optim, name), {"momentum": 0.9} if name == "SGD" else {}
    scalar = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = kind([scalar], 0.1, **options)
    scalar.grad = torch.tensor(0.5)
    optimizer.step()
    flat = scalar.detach().reshape(1).numpy().copy()
    own = kind([scalar], 0.1, **options)
    shard = TorchShard(own, [scalar], [Segment(0, 0, 1, 0, 0)], flat, lambda *_: None, own)
    shard.load_whole(read_states(optimizer, [scalar]))
    shard.step(np.full(1, 0.5, np.float32), 0)
    optimizer.step()
    assert flat.item() == scalar.item()
