"""The measurements that predictions of scaling need: the link, and a step without communication."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from hvdtrain.core import context
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.engines.communicator import Communicator
from hvdtrain.torch.operations.routes import as_buffer
from hvdtrain.types import DType
from hvdtrain_bench.cases.checked import sum_contender
from hvdtrain_bench.cases.models import MODELS, Trainer, bare, first_weights
from hvdtrain_bench.cases.peers import Peer, PeerLibraries
from hvdtrain_bench.cases.steps import with_hvdtrain
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import PROFILE_STEPS, SHARDED, period_of
from hvdtrain_bench.harness.turns import Bench, Contender
from hvdtrain_bench.scaling.paper import jitter_seconds, measured_scheme
from hvdtrain_bench.scaling.predictions import HVDTRAIN

_ITEM_BYTES = 4
_LINK_BYTES = (1 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_COPIED = "gradients copied, no communication"
_PHASES = ("forward", "backward", "copy", "optimizer")
_MACHINE = Path("/proc/sys/kernel/random/boot_id")  # containers of a machine have the same


def measure(bench: Bench, peers: PeerLibraries) -> None:
    """Measure all-reduces, the phases of bare steps, and hvdtrain's steps (collective).

    The result's extra has `link`: bytes of all-reduces, and seconds in each repeat; `core_share`:
    what they take of a core that computes; `crowding`: by which factor ranks outnumber the cores;
    and `works`: for each model its name, its buckets, the phases of each repeat, and the fields of
    its schemes.
    """
    bench.say("all-reduces")
    works: dict[str, Any] = {}
    bench.result.extra.update(
        link=_measure_link(bench, peers),
        core_share=_core_share(bench.ranks),
        crowding=_crowding(bench.ranks),
        works=works,
    )
    for key in bench.settings.models:
        bench.say(MODELS[key].title)
        works[key] = _measure_model(bench, peers, key)


def _measure_link(bench: Bench, peers: PeerLibraries) -> list[tuple[int, list[float]]]:
    memory = torch.as_tensor(peers.communicator.empty(max(_LINK_BYTES))).view(torch.float32)
    peer: Peer = peers.engine("engine mpi")
    points = []
    for nbytes in _LINK_BYTES:
        contender = sum_contender(bench.ranks, peer, memory[: nbytes // _ITEM_BYTES])
        found = bench.take_turns([contender], bench.settings.seconds_per_turn)
        points.append((nbytes, found[contender.name]))
    return points


def _core_share(ranks: Ranks) -> float:
    """Return 1 if ranks add on the cores on which they compute, and 0 if there are spare cores."""
    busy = context.current().topology.local_size * torch.get_num_threads()
    return ranks.largest(float(2 * busy > len(os.sched_getaffinity(0))))


def _crowding(ranks: Ranks) -> float:
    """Return by which factor the threads of ranks outnumber the cores of a machine, at least 1.

    Hosts that have a name each may be one machine, such as containers.
    """
    machine = _MACHINE.read_text()
    threads = ranks.all_of(machine).count(machine) * torch.get_num_threads()
    return ranks.largest(max(1.0, threads / len(os.sched_getaffinity(0))))


def _measure_model(bench: Bench, peers: PeerLibraries, key: str) -> dict[str, Any]:
    ranks, settings, model = bench.ranks, bench.settings, MODELS[key]
    weights = first_weights(model)
    batch = model.make_batch(model.batch, seed=ranks.rank)
    memory = peers.communicator.empty(sum(weight.nbytes for weight in weights))
    own = Trainer(model, weights, batch, bare, ranks.rank)
    phases = _Phases(own, torch.as_tensor(memory).view(torch.float32), peers.communicator)
    torch_library = f"torch {torch.__version__}"
    contenders = [
        Contender(_COPIED, torch_library, phases.restart, phases.step, lambda _: None, meets=True)
    ]
    periods = {_COPIED: 1, HVDTRAIN: 1} | {text: period_of(text) for text in settings.exchanges}
    for name in (HVDTRAIN, *settings.exchanges):
        exchange = None if name in (HVDTRAIN, SHARDED) else name
        wrap = partial(with_hvdtrain, sharded=name == SHARDED, exchange=exchange)
        trainer = Trainer(model, weights, batch, wrap, ranks.rank)
        step = partial(_repeat, trainer.step, periods[name])
        contenders.append(
            Contender(name, peers.library, trainer.restart, step, lambda _: None, meets=True)
        )
    turns = bench.take_turns(contenders, fewest_calls=PROFILE_STEPS * settings.steps_per_turn)
    seconds = {name: [value / periods[name] for value in values] for name, values in turns.items()}
    bench.add(model.title, seconds, _COPIED, model=key, title=model.title, samples=model.batch)
    specs = phases.specs()
    schemes = [asdict(measured_scheme(text, specs)) for text in settings.exchanges]
    return {"name": model.title, **phases.work(ranks), "schemes": schemes}


def _repeat(step: Callable[[], None], count: int) -> None:
    for _ in range(count):
        step()


class _Phases:
    """Trains without communication, and records when each phase ends."""

    def __init__(self, trainer: Trainer, memory: torch.Tensor, communicator: Communicator) -> None:
        self._trainer, self._memory, self._communicator = trainer, memory, communicator
        self._turns: list[dict[str, list[float]]] = []
        self._ready: list[list[float]] = []
        self._backward_started = self._copying = 0.0

    def restart(self) -> None:
        self._trainer.restart()
        self._turns.append({phase: [] for phase in _PHASES})
        if not self._ready:
            parameters = self._trainer.parameters
            parts = self._memory.split([parameter.numel() for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                times: list[float] = []
                self._ready.append(times)
                parameter.register_post_accumulate_grad_hook(self._copy_to(part, times))

    def _copy_to(self, part: torch.Tensor, times: list[float]) -> Callable[[torch.Tensor], None]:
        place = as_buffer(part)

        def copy(parameter: torch.Tensor) -> None:
            began = time.perf_counter()
            times.append(began - self._backward_started - self._copying)
            assert parameter.grad is not None
            self._communicator.put(as_buffer(parameter.grad), place)
            parameter.grad = part.view_as(parameter)
            self._copying += time.perf_counter() - began

        return copy

    def step(self) -> None:
        trainer = self._trainer
        started = time.perf_counter()
        trainer.optimizer.zero_grad()
        loss = trainer.loss()
        self._copying = 0.0
        self._backward_started = time.perf_counter()
        loss.backward()
        backward_ended = time.perf_counter()
        trainer.optimizer.step()
        ended = time.perf_counter()
        seconds = self._turns[-1]
        seconds["forward"].append(self._backward_started - started)
        seconds["backward"].append(backward_ended - self._backward_started - self._copying)
        seconds["copy"].append(self._copying)
        seconds["optimizer"].append(ended - backward_ended)

    def work(self, ranks: Ranks) -> dict[str, Any]:
        """Return `buckets` of paper.Work, and `repeats`: the rest in each turn (collective).

        The first turn does not count. They are means over the ranks of their medians.
        """
        return {
            "buckets": self._buckets([median(times) for times in self._ready]),
            "repeats": [_work_of_turn(ranks, turn) for turn in self._turns[1:]],
        }

    def specs(self) -> list[ParameterSpec]:
        return [
            ParameterSpec(
                str(number), tuple(p.shape), tuple(p.stride()), DType.FLOAT32, "float32", "cpu"
            )
            for number, p in enumerate(self._trainer.parameters)
        ]

    def _buckets(self, ready: list[float]) -> list[tuple[int, float]]:
        """Return bytes of each bucket of hvdtrain's plan, and when its last gradient is there.

        The plan is the one from the second step on, in the order in which gradients come.
        """
        here = context.current()
        limit = agree_on_bucket_size(here.world).nbytes
        order = sorted(range(len(ready)), key=ready.__getitem__)
        plan = make_plan(self.specs(), limit, here.config.first_bucket_bytes, order=order)
        return [
            (bucket.count * _ITEM_BYTES, max(ready[index] for index in bucket.parameters))
            for bucket in plan.buckets
        ]


def _work_of_turn(ranks: Ranks, turn: dict[str, list[float]]) -> dict[str, float]:
    """Return the fields of paper.Work that a turn has measured (collective)."""
    medians = {
        f"{phase}_seconds": mean(ranks.all_of(median(times))) for phase, times in turn.items()
    }
    totals = [sum(phases) for phases in zip(*turn.values(), strict=True)]
    return {**medians, "jitter_seconds": jitter_seconds(ranks.all_of(totals))}
