"""The rounds of a parameter server, and the shards of the weights, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import context, operations
from hvdtrain.core.agreement.operation import Request, Work
from hvdtrain.core.objects import allgather_object
from hvdtrain.core.sharding.segments import Segment
from hvdtrain.engines.communicator import Pending, PointToPoint, poll_until
from hvdtrain.errors import OneRankTrainingError, UsageError
from hvdtrain.train.parameter_server.protocol import (
    ANSWER,
    GRADIENT,
    PULL,
    PUSH,
    REQUEST,
    WEIGHTS,
    AsynchronousProtocol,
    ParameterServer,
    Protocol,
    Pushes,
    SynchronousProtocol,
    Update,
)

# Elements of a parameter, of a shard or of all shards, [n].
Flat = npt.NDArray[Any]
# The optimizer's state of a parameter or of a part of it by name: a flat array with one element for
# each of its elements, or any other value.
State: TypeAlias = dict[str, Any]

_TYPES = ("float32", "float64")


class ParameterRow:
    """Copies of a model's trained parameters and their gradients in host memory, [n] each.

    A framework reads the elements of a tensor, writes those of a parameter, and finds the gradient
    of each parameter, where None counts as 0.
    """

    def __init__(
        self,
        parameters: Sequence[Any],
        types: Sequence[str],
        read: Callable[[Any], Flat],
        write: Callable[[Any, Flat], None],
        gradients_of: Callable[[], Sequence[Any]],
    ) -> None:
        found = sorted(set(types))
        if len(found) != 1 or found[0] not in _TYPES:
            raise UsageError(
                f"a parameter server needs trained parameters of one type, {' or '.join(_TYPES)}, "
                f"got {' and '.join(found) or 'no parameter'}"
            )
        self.parameters, self.sizes = parameters, [prod(p.shape) for p in parameters]
        self._read, self._write, self._gradients_of = read, write, gradients_of
        self.weights: Flat = np.zeros(sum(self.sizes), found[0])
        self.gradients: Flat = np.zeros_like(self.weights)

    def read_weights(self) -> None:
        self._copy(self.parameters, self.weights)

    def write_weights(self) -> None:
        for parameter, part in zip(self.parameters, self.parts(self.weights), strict=True):
            self._write(parameter, part)

    def is_current(self) -> bool:
        """Return whether the copies have the bits of the parameters."""
        pairs = zip(self.parameters, self.parts(self.weights), strict=True)
        bits = f"u{self.weights.itemsize}"
        return all(
            np.array_equal(np.ascontiguousarray(self._read(p)).view(bits), part.view(bits))
            for p, part in pairs
        )

    def read_gradients(self) -> None:
        self._copy(self._gradients_of(), self.gradients)

    def _copy(self, tensors: Sequence[Any], flat: Flat) -> None:
        for tensor, part in zip(tensors, self.parts(flat), strict=True):
            part[:] = 0 if tensor is None else self._read(tensor)

    def parts(self, flat: Flat) -> list[Flat]:
        return np.split(flat, np.cumsum(self.sizes)[:-1])


# Parameters are cut at multiples of this. Vectorized optimizers round the elements of a vector and
# those left over differently: these are then the same in the pieces as in the whole parameter.
_CUT_ELEMENTS = 64


def shard_bounds(sizes: Sequence[int], servers: int) -> list[tuple[int, int]]:
    """Return where each shard begins and ends in the row of all parameters."""
    elements, cuts = sum(sizes), []
    for server in range(servers):  # at the last place where a parameter may be cut
        position = elements * server // servers
        start = max(start for start in accumulate([0, *sizes]) if start <= position)
        cuts.append(start + (position - start) // _CUT_ELEMENTS * _CUT_ELEMENTS)
    return list(pairwise([*cuts, elements]))


def segments_in(sizes: Sequence[int], bounds: tuple[int, int]) -> Iterator[Segment]:
    """Yield the parts of parameters in a shard, in the order of the parameters."""
    first, end = bounds
    for parameter, (start, size) in enumerate(zip(accumulate([0, *sizes]), sizes, strict=False)):
        begin, stop = max(first, start), min(end, start + size)
        if begin < stop:
            yield Segment(parameter, begin - start, stop - begin, 0, begin - first)


def _is_flat(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 1


class Shard(ABC):
    """A server's part of the weights, [n], with an optimizer whose steps change them in place."""

    def __init__(self, segments: Sequence[Segment], weights: Flat) -> None:
        self.segments, self.weights = segments, weights

    @abstractmethod
    def step(self, gradient: Flat, number: int) -> None:
        """Step the optimizer."""

    @abstractmethod
    def states(self) -> Sequence[State]:
        """Return the optimizer's state of each segment."""

    @abstractmethod
    def load(self, states: Sequence[State]) -> None:
        """Take the present weights, and these states of the segments."""

    def parts(self, flat: Flat) -> list[Flat]:
        """Return the elements of each segment."""
        return [flat[segment.in_bucket] for segment in self.segments]

    def load_whole(self, states: Sequence[State]) -> None:
        """Take the present weights, and the segments' parts of the states of all parameters."""
        parts = [
            {
                name: value[segment.in_parameter] if _is_flat(value) else value
                for name, value in states[segment.parameter].items()
            }
            for segment in self.segments
        ]
        self.load(parts)


def is_type(value: object) -> bool:
    return isinstance(value, np.dtype)


def refuse_optimizer(optimizer: object, framework: str, known: Sequence[type]) -> None:
    """Raise the error for an optimizer that cannot step on parts of parameters."""
    names = ", ".join(kind.__name__ for kind in known)
    raise UsageError(
        f"--strategy ps cannot use the recipe's optimizer {type(optimizer).__name__}: servers step "
        f"on parts of parameters, as {framework}'s {names} can"
    )


def _wait_for(pending: Iterable[Pending]) -> None:
    for operation in pending:
        operation.wait()


class Server:
    """A server between two pauses of the run."""

    def __init__(
        self,
        messages: PointToPoint,
        shard: Shard,
        protocol: Protocol,
        blocked: Callable[[], AbstractContextManager[None]],
        first: int,
    ) -> None:
        self._messages, self._shard, self._protocol = messages, shard, protocol
        self._blocked, self._first = blocked, first
        self._gradients: dict[int, Flat] = {}
        self._outgoing: dict[int, Flat] = {}
        self._sends: dict[int, list[Pending]] = {}

    @collective
    def serve(self, rounds: int, go_on: Callable[[], bool]) -> int:
        """Serve until all workers are done (collective, with the workers' rounds)."""
        done, goes_on = 0, True
        while done < rounds and goes_on:
            self._take_request()
            for worker, late in self._protocol.answers():
                self._answer(worker, late)
            while done < self._protocol.rounds_done and goes_on:
                done, goes_on = done + 1, go_on()
        for sends in self._sends.values():
            _wait_for(sends)
        return done

    def _take_request(self) -> None:
        worker: int | None = None

        def is_asked() -> bool:
            nonlocal worker
            worker = self._messages.waiting(REQUEST)
            return worker is not None

        with self._blocked():
            poll_until(is_asked)
            assert worker is not None
            request = np.zeros(3, np.int64)
            self._receive(request, worker, REQUEST)
        kind, samples, version = request.tolist()
        if kind == PULL:
            self._protocol.pull(worker, samples)
            return
        if samples:
            if worker not in self._gradients:
                self._gradients[worker] = np.empty_like(self._shard.weights)
            with self._blocked():
                self._receive(self._gradients[worker], worker, GRADIENT)
        update = self._protocol.push(worker, samples, version)
        if update is not None:
            self._shard.step(self._combine(update), self._first + update.round)

    def _receive(self, array: Flat, worker: int, tag: int) -> None:
        self._messages.start_receive(Buffer.of(array), worker, tag).wait()

    def _combine(self, update: Update) -> Flat:
        """Return the weighted sum of gradients, added in the order of the workers."""
        (first, weight), *rest = update.weights.items()
        total = self._gradients[first]
        if weight != 1.0:
            total *= weight
        for worker, weight in rest:
            gradient = self._gradients[worker]
            gradient *= weight
            total += gradient
        return total

    def _answer(self, worker: int, late: bool) -> None:
        _wait_for(self._sends.pop(worker, ()))  # it has them: it would not have asked otherwise
        header = np.array([late, self._protocol.version], np.int64)
        self._sends[worker] = [self._messages.start_send(Buffer.of(header), worker, ANSWER)]
        if late:
            return
        if worker not in self._outgoing:
            self._outgoing[worker] = np.empty_like(self._shard.weights)
        copy = self._outgoing[worker]  # the weights change while it is sent
        copy[:] = self._shard.weights
        self._sends[worker].append(self._messages.start_send(Buffer.of(copy), worker, WEIGHTS))


class ServedRounds:
    """A rank's part in the rounds of a parameter server (collective to make)."""

    @collective
    def __init__(
        self,
        settings: ParameterServer,
        row: ParameterRow,
        make_shard: Callable[[Sequence[Segment], Flat], Shard],
    ) -> None:
        here = context.current()
        rank, size = here.topology.rank, here.topology.size
        self._settings, self._row = settings, row
        self.workers, self.pushes = size - settings.servers, Pushes()
        ranges = shard_bounds(row.sizes, settings.servers)
        self._bounds = dict(zip(range(self.workers, size), ranges, strict=True))
        # An agreed operation, because a round may be using the communicator that it duplicates.
        request = Request("opening messages between pairs of ranks")
        opened: PointToPoint = here.world.run(Work(request, lambda c: c.point_to_point()))
        here.world.before_closing(opened.close)
        self._messages, self._blocked = opened, here.blocked.running
        self._versions = dict.fromkeys(self._bounds, 0)  # of the weights that a worker has
        self._shard: Shard | None = None
        if rank in self._bounds:
            bounds = self._bounds[rank]
            segments = list(segments_in(row.sizes, bounds))
            self._shard = make_shard(segments, row.weights[slice(*bounds)])
        self._received = Pushes()
        self.lent = False  # whether callbacks may have changed the model since a round began

    @property
    def serves(self) -> bool:
        return self._shard is not None

    def load(self, states: Callable[[], Sequence[State]]) -> None:
        """Begin with the present parameters, and the optimizer's states of these."""
        self.lent = False
        self._row.read_weights()
        if self._shard is not None:
            self._shard.load_whole(states())

    def pull(self, samples: int) -> bool:
        """Begin a round of a worker: take the servers' weights; return False if it is over."""
        self._refuse_changes()
        answers = {server: np.zeros(2, np.int64) for server in self._bounds}
        receive, weights = self._messages.start_receive, self._row.weights
        with self._blocked():
            pending = [receive(Buffer.of(a), server, ANSWER) for server, a in answers.items()]
            _wait_for(pending + self._request(PULL, samples))
            if any(late for late, _ in answers.values()):
                return False
            _wait_for(
                [
                    receive(Buffer.of(weights[begin:end]), server, WEIGHTS)
                    for server, (begin, end) in self._bounds.items()
                ]
            )
        self._versions = {server: int(version) for server, (_, version) in answers.items()}
        self._row.write_weights()
        return True

    def _refuse_changes(self) -> None:
        """Refuse what callbacks have changed on a worker while servers have the weights."""
        if self.lent and not self.serves and not self._row.is_current():
            raise OneRankTrainingError(
                "a callback changed weights in on_train_batch_end, where those of the parameter "
                "servers overwrite them: change them in on_epoch_end or on_test_end, or leave out "
                "--strategy ps"
            )
        self.lent = False

    def push(self, step: int, samples: int) -> None:
        """End a round of a worker: send the gradients to the servers, each its part."""
        self._row.read_gradients()
        gradients = self._row.gradients
        if samples and not np.isfinite(gradients).all():
            raise OneRankTrainingError(
                f"step {step + 1}: the gradient of this rank is not finite. Lower --lr, "
                "lengthen --warmup-epochs, or look at the samples of this step"
            )
        with self._blocked():
            pending = self._request(PUSH, samples)
            if samples:
                pending += [
                    self._messages.start_send(Buffer.of(gradients[begin:end]), server, GRADIENT)
                    for server, (begin, end) in self._bounds.items()
                ]
            _wait_for(pending)

    def _request(self, kind: int, samples: int) -> list[Pending]:
        headers = {s: np.array([kind, samples, v], np.int64) for s, v in self._versions.items()}
        send = self._messages.start_send
        return [send(Buffer.of(header), server, REQUEST) for server, header in headers.items()]

    def serve(self, first: int, rounds: int, go_on: Callable[[], bool]) -> int:
        """Serve the rounds of all workers; return how many these were."""
        assert self._shard is not None
        settings = self._settings
        protocol: Protocol = (
            AsynchronousProtocol(self.workers, settings.staleness)
            if settings.is_async
            else SynchronousProtocol(self.workers, settings.backup)
        )
        server = Server(self._messages, self._shard, protocol, self._blocked, first)
        done = server.serve(rounds, go_on)
        self._received = protocol.pushes
        return done

    @collective
    def collect(self) -> list[State]:
        """Overwrite the parameters of all ranks with the servers' weights; return the states."""
        self._refuse_changes()
        row, shard = self._row, self._shard
        own = [] if shard is None else list(zip(shard.segments, shard.states(), strict=True))
        outline = [  # in which arrays are their types
            (segment, {n: v.dtype if _is_flat(v) else v for n, v in state.items()})
            for segment, state in own
        ]
        gathered = allgather_object((outline, self._received), name="shards")
        self._received = Pushes()
        for _, received in gathered:
            self.pushes.add(received)
        self._broadcast_shards("weights", row.weights)
        row.write_weights()
        outlines = [pair for outline, _ in gathered for pair in outline]
        types = {n: v for _, state in outlines for n, v in state.items() if is_type(v)}
        arrays: dict[str, list[Flat]] = {}
        for name in sorted(types):  # one at a time, in place: they are as large as the weights
            whole = np.zeros(sum(row.sizes), types[name])
            for segment, state in own:
                if name in state:
                    mine = whole[slice(*self._bounds[context.current().topology.rank])]
                    mine[segment.in_bucket] = state[name]
            self._broadcast_shards(name, whole)
            arrays[name] = row.parts(whole)
        states: list[State] = [{} for _ in row.sizes]
        for segment, state in outlines:
            index = segment.parameter
            states[index] |= {n: arrays[n][index] if is_type(v) else v for n, v in state.items()}
        return states

    @collective
    def _broadcast_shards(self, name: str, whole: Flat) -> None:
        channel = context.current().world
        for server, (begin, end) in self._bounds.items():
            if begin < end:
                part, label = whole[begin:end], f"{name} of rank {server}"
                operations.broadcast(channel, Buffer.of(part), part.shape, server, label).run()
