"""The measurements that predictions of scaling need: the link, and a step without communication."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch

from hvdtrain.core import context
from hvdtrain.core.bucket_plans import agree_on_bucket_size
from hvdtrain.core.gradients.plan import ParameterSpec, make_plan
from hvdtrain.engines.communicator import Communicator
from hvdtrain.torch.tensors.buffers import as_buffer
from hvdtrain.types import DType
from hvdtrain_bench.analysis.paper import jitter_seconds
from hvdtrain_bench.cases.models import MODELS
from hvdtrain_bench.cases.peers import Peer, Peers
from hvdtrain_bench.cases.steps import with_hvdtrain
from hvdtrain_bench.cases.sums import sum_contender
from hvdtrain_bench.cases.trainer import Trainer, bare, first_weights
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import Case, PeerFacts, Result
from hvdtrain_bench.harness.settings import Settings
from hvdtrain_bench.harness.turns import Contender, take_turns

__all__ = ["measure_profile"]

_ITEM_BYTES = 4
_LINK_BYTES = (1 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
_COPIED, _BASE = "gradients copied, no communication", "hvdtrain"


def measure_profile(
    ranks: Ranks, peers: Peers, settings: Settings, say: Callable[[str], None]
) -> Result:
    """Measure all-reduces, the phases of bare steps, and hvdtrain's steps (collective).

    Args:
        ranks: all ranks.
        peers: source of the engine.
        settings: models and number of repeats.
        say: prints what is measured now.

    Returns:
        A result whose extra has `link`: [bytes, seconds] of all-reduces; `core_share`: what they
        take of a core that computes; and `works`: for each model the fields of paper.Work.
    """
    say("all-reduces")
    extra: dict[str, Any] = {
        "link": _measure_link(ranks, peers, settings),
        "core_share": _core_share(ranks),
        "works": {},
    }
    cases: list[Case] = []
    facts: dict[str, PeerFacts] = {}
    for key in settings.models:
        model = MODELS[key]
        say(model.title)
        case, found, work = _measure_model(ranks, peers, settings, key)
        cases.append(case)
        facts |= {peer.name: peer for peer in found}
        extra["works"][key] = {"name": model.title, **work}
    return Result("profile", ranks.size, peers.nodes, list(facts.values()), {}, cases, extra)


def _measure_link(ranks: Ranks, peers: Peers, settings: Settings) -> list[tuple[int, float]]:
    memory = torch.as_tensor(peers.communicator.empty(max(_LINK_BYTES))).view(torch.float32)
    peer: Peer = peers.engine("engine mpi")
    points = []
    for nbytes in _LINK_BYTES:
        contender = sum_contender(ranks, peer, memory[: nbytes // _ITEM_BYTES])
        turns = take_turns(ranks, [contender], settings.repeats, settings.seconds_per_turn)
        points.append((nbytes, median(turns.seconds[contender.name])))
    return points


def _core_share(ranks: Ranks) -> float:
    """Return 1 if ranks add on the cores on which they compute, and 0 if there are spare cores."""
    busy = context.current().topology.local_size * torch.get_num_threads()
    return ranks.largest(float(2 * busy > len(os.sched_getaffinity(0))))


def _measure_model(
    ranks: Ranks, peers: Peers, settings: Settings, key: str
) -> tuple[Case, list[PeerFacts], dict[str, Any]]:
    model = MODELS[key]
    weights = first_weights(model)
    batch = model.make_batch(model.batch, seed=ranks.rank)
    memory = peers.communicator.empty(sum(weight.nbytes for weight in weights))
    own = Trainer(model, weights, batch, bare, ranks.rank)
    phases = _Phases(own, torch.as_tensor(memory).view(torch.float32), peers.communicator)
    trainer = Trainer(model, weights, batch, with_hvdtrain, ranks.rank)
    contenders = [
        Contender(
            _COPIED, f"torch {torch.__version__}", phases.restart, phases.step, _pass, meets=True
        ),
        Contender(_BASE, peers.library, trainer.restart, trainer.step, _pass, meets=True),
    ]
    turns = take_turns(ranks, contenders, settings.repeats, 0.0, settings.steps_per_turn)
    about = {"model": key, "title": model.title, "samples": model.batch}
    case = Case(model.title, about, "seconds", turns.seconds, _COPIED)
    return case, turns.peers, phases.work(ranks)


class _Phases:
    """Trains without communication, and records when each phase ends.

    Args:
        trainer: training steps.
        memory: target of the gradients' copies, as of buckets.
        communicator: communicator that copies them.
    """

    def __init__(self, trainer: Trainer, memory: torch.Tensor, communicator: Communicator) -> None:
        self._trainer, self._memory, self._communicator = trainer, memory, communicator
        phases = ("forward", "backward", "copy", "optimizer")
        self._seconds: dict[str, list[float]] = {phase: [] for phase in phases}
        self._ready: list[list[float]] = []
        self._backward_started = self._copying = 0.0

    def restart(self) -> None:
        """Restore the first weights."""
        self._trainer.restart()
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
        """Train one step."""
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
        self._seconds["forward"].append(self._backward_started - started)
        computing = backward_ended - self._backward_started - self._copying
        self._seconds["backward"].append(computing)
        self._seconds["copy"].append(self._copying)
        self._seconds["optimizer"].append(ended - backward_ended)

    def work(self, ranks: Ranks) -> dict[str, Any]:
        """Return the fields of paper.Work: means over the ranks of their medians (collective)."""
        medians = {
            f"{phase}_seconds": mean(ranks.all_of(median(times)))
            for phase, times in self._seconds.items()
        }
        totals = [sum(phases) for phases in zip(*self._seconds.values(), strict=True)]
        return {
            **medians,
            "buckets": self._buckets([median(times) for times in self._ready]),
            "jitter_seconds": jitter_seconds(ranks.all_of(totals)),
        }

    def _buckets(self, ready: list[float]) -> list[tuple[int, float]]:
        """Return bytes of each bucket of hvdtrain's plan, and when its last gradient is there.

        The plan is the one from the second step on, in the order in which gradients come.
        """
        here = context.current()
        limit = agree_on_bucket_size(here.world).nbytes
        specs = [
            ParameterSpec(
                str(number), tuple(p.shape), tuple(p.stride()), DType.FLOAT32, "float32", "cpu"
            )
            for number, p in enumerate(self._trainer.parameters)
        ]
        order = sorted(range(len(ready)), key=ready.__getitem__)
        plan = make_plan(specs, limit, here.config.first_bucket_bytes, order=order)
        return [
            (bucket.count * _ITEM_BYTES, max(ready[index] for index in bucket.parameters))
            for bucket in plan.buckets
        ]


def _pass(_: int) -> None:
    pass
