"""Samples that are the same on all ranks and should differ, and the reverse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.collective import averages_by_hvd
from hvdtrain_lint.source.data import evaluates, is_true
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import words_in

_SEEDING = re.compile(r"seed", re.IGNORECASE)
_SEEDS_TORCH = ("torch.manual_seed", "torch.random.manual_seed")
_DIVIDED = re.compile(r"shard|split|subset|partition|sampl|chunk|stream|iter|rank", re.IGNORECASE)


def equal_seeds(script: Script) -> list[ast.Call]:
    """Return the calls that seed a generator alike on all ranks, or may do so."""
    return [
        call
        for call in script.tree.calls
        if _SEEDING.search(script.names.last(call))
        and not any(script.ranks.mentions_rank(each) for each in call.args)
    ]


def _same_batches(script: Script) -> Iterator[Found]:
    wraps = averages_by_hvd(script) or bool(script.named("DistributedDataParallel"))
    if not wraps or script.has_trainer or script.uses_accelerate:
        return
    seeds = [c for c in script.tree.calls if script.names.full(c) in _SEEDS_TORCH]
    alike = [c for c in script.everywhere(seeds) if c in equal_seeds(script)]
    if not alike or len(alike) != len(seeds):
        return
    for call in script.everywhere(script.named("DataLoader")):
        data = keyword(call, "dataset", 0)
        own = {each.arg for each in call.keywords} & {"sampler", "batch_sampler", "generator", None}
        if data is None or own or len(call.args) > 2 or not is_true(keyword(call, "shuffle")):
            continue
        if not evaluates(script, data) and not _is_divided(script, data):
            yield Found(
                call,
                f"all ranks have one seed (line {alike[0].lineno}) and the whole data set here",
            )


def _is_divided(script: Script, data: ast.expr) -> bool:
    return any(
        _DIVIDED.search(word)
        for each in [data, *script.values.origins(data)]
        for word in words_in(each)
    ) or any(script.ranks.mentions_rank(each) for each in script.values.origins(data))


def _own_split(script: Script) -> Iterator[Found]:
    if equal_seeds(script):
        return
    for call in script.everywhere(script.named("random_split", "train_test_split")):
        last = script.names.last(call)
        if last == "random_split" and keyword(call, "generator", 2) is None:
            yield Found(call, "random_split() has no seed")
        elif last == "train_test_split" and not _is_seeded_split(call):
            yield Found(call, "train_test_split() has no seed")


def _is_seeded_split(call: ast.Call) -> bool:
    named = {each.arg for each in call.keywords}
    if None in named or "random_state" in named:
        return True
    shuffle = keyword(call, "shuffle")
    return shuffle is not None and not is_true(shuffle)


RULES = (
    Rule(
        "HVD206",
        "the same seed and the same data on all ranks",
        "all ranks train on the same batches, and more ranks learn nothing more",
        "divide the data (DistributedSampler, GlobalBatchSampler), or seed with the rank",
        _same_batches,
    ),
    Rule(
        "HVD207",
        "a random division of the data without a seed",
        "each rank divides differently, and trains on what others test with",
        "give it the same seed on all ranks: generator=torch.Generator().manual_seed(0), or "
        "random_state=0",
        _own_split,
    ),
)
