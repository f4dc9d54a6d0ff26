"""Samplers that give the same order in every epoch."""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import is_read_again, is_true, rank_samplers
from hvdtrain_lint.source.script import Script, keyword

_SAMPLERS = ("DistributedSampler", "GlobalBatchSampler", "ElasticSampler")
_SHUFFLE_POSITION = 3


def _same_order(script: Script) -> Iterator[Found]:
    if "set_epoch" in script.words or script.has_trainer or script.uses_accelerate:
        return
    for call, for_evaluation in rank_samplers(script, *_SAMPLERS):
        shuffle = keyword(call, "shuffle", _SHUFFLE_POSITION)
        shuffles = shuffle is None or is_true(shuffle)
        if shuffles and not for_evaluation and is_read_again(script, call):
            name = script.names.last(call)
            yield Found(call, f"the script repeats epochs and never calls set_epoch() of {name}")


RULES = (
    Rule(
        "HVD201",
        "a sampler for ranks without set_epoch() in a script with epochs",
        "each epoch has the samples in the same order, and in the same batches",
        "call sampler.set_epoch(epoch) at the start of every epoch",
        _same_order,
    ),
)
