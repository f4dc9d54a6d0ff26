"""Training steps with each exchange, in slices between those of the others, and the bytes sent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from random import Random

import torch

import hvdtrain.torch as hvd
from hvdtrain_bench.analysis.judge import AVERAGE, AVERAGE_AGAIN, NO_COMMUNICATION
from hvdtrain_bench.cases.checked import Agreement
from hvdtrain_bench.cases.models import MODELS, BenchModel, Trainer, bare, first_weights
from hvdtrain_bench.cases.peers import PeerLibraries
from hvdtrain_bench.cases.steps import with_hvdtrain
from hvdtrain_bench.harness.network import sent_bytes
from hvdtrain_bench.harness.ranks import Ranks
from hvdtrain_bench.harness.results import MeasurementSettings, turn_steps
from hvdtrain_bench.harness.turns import Bench, Contender

_FIRST_STEPS = 2


def _take_slices(
    bench: Bench, contenders: Mapping[Contender, int]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return a step's mean time in each turn of so many, and what a host sends in it (collective).

    In each repeat every contender takes one turn, in slices of a few steps. The slices of all
    contenders alternate at random, so that turns of very different lengths see the same machine.
    """
    ranks, settings = bench.ranks, bench.settings
    for contender in contenders:
        contender.prepare()
        for _ in range(_FIRST_STEPS):
            contender.call()
        contender.check(_FIRST_STEPS)  # also begins a new period
        bench.note(contender.name, contender.library)
    found: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    sent = dict.fromkeys(found, 0)
    for repeat in range(settings.repeats):
        slices = [
            (contender, min(settings.steps_per_turn, steps - start))
            for contender, steps in contenders.items()
            for start in range(0, steps, settings.steps_per_turn)
        ]
        Random(repeat).shuffle(slices)
        seconds = dict.fromkeys(found, 0.0)
        for contender, steps in slices:
            ranks.rest()
            ranks.meet()
            began = time.perf_counter()
            before = sent_bytes(loopback=False)
            for _ in range(steps):
                contender.call()
            sent[contender.name] += sent_bytes(loopback=False) - before
            seconds[contender.name] += ranks.largest(time.perf_counter() - began)
        for contender, steps in contenders.items():
            contender.check(steps)
            found[contender.name].append(seconds[contender.name] / steps)
    taken = {c.name: settings.repeats * steps for c, steps in contenders.items()}
    return found, {name: max(ranks.all_of(own / taken[name])) for name, own in sent.items()}


def measure(bench: Bench, peers: PeerLibraries) -> None:
    ranks, settings = bench.ranks, bench.settings
    for key in settings.models:
        model = MODELS[key]
        bench.say(model.title)
        contenders = _contenders(ranks, model, settings, peers.library)
        seconds, sent = _take_slices(bench, contenders)
        steps = {contender.name: count for contender, count in contenders.items()}
        bench.add(
            model.title,
            seconds,
            AVERAGE,
            AVERAGE_AGAIN,
            model=key,
            title=model.title,
            steps=steps,
            sent_bytes=sent,
        )


def _contenders(
    ranks: Ranks, model: BenchModel, settings: MeasurementSettings, library: str
) -> dict[Contender, int]:
    weights = first_weights(model)
    batch = model.make_batch(model.batch, seed=ranks.rank)
    texts = {AVERAGE: "average", AVERAGE_AGAIN: "average"} | {t: t for t in settings.exchanges}
    steps = {name: turn_steps(text, settings.steps_per_turn) for name, text in texts.items()}
    plain = Trainer(model, weights, batch, bare, ranks.rank)
    version = f"torch {torch.__version__}"
    judge = Agreement(ranks, alike=False)  # exchanges differ
    silent = judge.without_communication(NO_COMMUNICATION, version, plain)
    # As long as the longest turn, which may have to be compared with it within a few percent.
    found = {silent: max(steps.values())}
    for name, text in texts.items():
        wrap = partial(with_hvdtrain, exchange=text)
        trainer = _Flushed(model, weights, batch, wrap, ranks.rank)
        found[judge.together(name, library, trainer)] = steps[name]
    return found


class _Flushed(Trainer):
    def moved(self) -> float:
        """Return the same of weights that are equal, if ranks exchange them now and then."""
        assert isinstance(self.optimizer, hvd.DistributedOptimizer)
        self.optimizer.flush()
        return super().moved()
