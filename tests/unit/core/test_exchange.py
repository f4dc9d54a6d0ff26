"""Exchanges: the parts that need no other rank, and exchanges from text."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from exchanging import plan_of
from one_bit import OneBit
from refusing import refused

from hvdtrain.buffer import Buffer
from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.block_momentum import BlockMomentum
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.diloco import DiLoCo
from hvdtrain.core.exchanges.half import HalfExchange
from hvdtrain.core.exchanges.local_sgd import LocalSGD, PostLocalSGD
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.communicators import Communicators
from hvdtrain.core.gradients.exchange import (
    AllreduceExchange,
    ExchangeState,
    FilledBucket,
    StepInfo,
)
from hvdtrain.core.gradients.plan import Bucket, ParameterSpec
from hvdtrain.engines.local import LocalCommunicator
from hvdtrain.types import DType, ReduceOp


def test_a_warm_up_counts_all_steps_that_are_exchanged() -> None:
    """Also those that a loss scaler leaves out afterwards."""
    steps, samples = WarmUp(OneBit(), 2), WarmUp(OneBit(), samples=10)
    for finite in (True, False):
        assert steps.in_warm_up
        assert samples.in_warm_up
        for each in (steps, samples):
            each.end(StepInfo(0, 2, total=5.0, weighted=True, finite=finite))
    assert not steps.in_warm_up
    assert not samples.in_warm_up


def test_a_warm_up_before_a_sum_is_a_sum() -> None:
    warm = WarmUp(HalfExchange(op=ReduceOp.SUM), 2)
    assert warm.op is ReduceOp.SUM
    assert warm.exactness.startswith("For 2 steps the exact sum. Then: ")
    buffer = Buffer.from_array(np.array([1.0, 2.0]))
    spec = ParameterSpec("p0", (2,), (1,), DType.FLOAT64, "float64", "cpu")
    bucket = FilledBucket(0, buffer, Bucket((0,), (0,), 2, DType.FLOAT64), (spec,))
    one_of_two = StepInfo(0, 2, weight=3.0, total=6.0, weighted=True)
    warm.reduce(bucket, one_of_two, Communicators.flat(LocalCommunicator()))
    assert buffer.array().tolist() == [1.0, 2.0]


def test_a_slice_of_a_bucket_is_split_at_its_parameters() -> None:
    plan, elements = plan_of(DType.FLOAT32, 1 << 20), np.arange(111, dtype=np.float32)
    bucket = FilledBucket(0, Buffer.from_array(elements), plan.buckets[0], plan.specs)
    starts = dict(zip(bucket.layout.parameters, bucket.layout.starts, strict=True))
    found: Any = bucket.pieces(bucket.elements[10:100], 10)
    assert np.concatenate([piece.elements for piece in found]).tolist() == [*range(10, 100)]
    assert all(piece.elements[0] == starts[piece.index] + piece.first for piece in found)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllreduceExchange(ReduceOp.MAX), "op must be Average or Sum"),
        (lambda: WarmUp(AllreduceExchange(), -1), "at least 0, got -1"),
        (lambda: AllreduceExchange().load(ExchangeState({"x.1": np.zeros(1)})), "nothing.*x.1"),
        (lambda: BlockMomentum(steps=1).load(ExchangeState()), "was given no look-ahead"),
        (lambda: DiLoCo().load(ExchangeState()), "was given no next fragment"),
        (lambda: WarmUp(AllreduceExchange(), 1).load(ExchangeState()), "warm-up steps"),
        (lambda: AdasumExchange().prepare(plan_of(DType.INT32, 100)), "'p0' is int32"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], None], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_options_are_converted_to_the_types_of_the_arguments() -> None:
    assert make_exchange("average:predivide=2").spec == "allreduce:op=average,predivide=2.0"
    assert make_exchange("postlocal:after=9,steps=2").spec == PostLocalSGD(9, 2).spec
    assert "momentum=0.5,rate=1.0" in make_exchange("blockmomentum:block=9,momentum=0.5").spec
    assert make_exchange("adasum: warmup = 3").spec.startswith(f"{AdasumExchange().spec} after 3")


def test_steps_are_whole_numbers() -> None:
    steps: Any
    for steps in (2.5, "2", float("nan")):
        for make in (LocalSGD, DiLoCo, partial(AutoExchange, "half"), PowerSGDExchange):
            with pytest.raises(TypeError, match=f"must be a whole number, got {steps!r}"):
                make(steps)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("averag", "exchange 'averag': the name must be one of average, half, adasum"),
        ("average:bits=1", "one of predivide, warmup, distributed_after, got 'bits=1'"),
        ("average:predivide=x", "exchange 'average:predivide=x': predivide must be a number"),
        ("average:predivide=0", "predivide must be a positive number, got 0.0"),
        ("adasum:warmup=1.5", "warmup must be a whole number, got '1.5'"),
        ("adasum:warmup=1,warmup=2", "warmup is given twice"),
        ("local", "exchange 'local': needs steps="),
        ("local:steps=2,state=drop", "state must be one of keep, average, reset, got drop"),
        ("diloco:fragments=2,state=reset", "state=reset needs fragments=1"),
        ("postlocal:after=0,steps=2", "after must be a number of steps above 0, or rate, got 0"),
        ("postlocal:after=9,steps=2,warmup=3", "begins with plain averages by itself"),
        ("blockmomentum", "give block= (samples of all ranks) or steps= (of each rank)"),
        ("blockmomentum:block=4,steps=4", "got block=4 and steps=4"),
        ("blockmomentum:steps=4,momentum=1", "momentum must be at least 0 and less than 1"),
        ("blockmomentum:steps=4,time_constant=9", "time_constant needs block"),
        ("blockmomentum:block=4,time_constant=0", "time_constant must be a positive number, got 0"),
        (f"blockmomentum:block=1{'0' * 400},time_constant=1", "int too large to convert to float"),
        ("blockmomentum:steps=4,rate=inf", "rate must be a positive number, got inf"),
        ("diloco:rate=inf", "rate must be a positive number, got inf"),
        ("diloco:momentum=1", "momentum must be at least 0 and less than 1"),
        ("diloco:type=fp8", "type must be one of float32, bf16, int8, int4, got fp8"),
        ("diloco:fragments=3", "steps must be a multiple of fragments, got steps=500 and"),
        ("nbit:bits=3", "bits must be 1, 2, 4 or 8, got 3"),
        ("nbit:block=100", "block must be a multiple of 8, or 0 for columns, got 100"),
        ("powersgd:rank=0", "rank must be at least 1, got 0"),
        ("powersgd:min_rate=nan", "min_rate must be a positive number, got nan"),
        ("topk:ratio=0", "ratio must be above 0 and at most 1, got 0.0"),
        ("topk:momentum=1", "momentum must be at least 0 and less than 1, got 1.0"),
        ("auto:allow=diloco", "name must be one of half, nbit, powersgd, topk"),
        ("auto:allow=nbit:bits=3", "bits must be 1, 2, 4 or 8, got 3"),
        ("auto:allow=half+nbit:bits=2/rank=1", "one of bits, block, per_rank, got 'rank=1'"),
        ("auto:steps=0", "steps must be at least 1, got 0"),
        ("nbit:warmup=1,distributed_after=9", "in steps or samples (distributed_after), not both"),
        ("nbit:distributed_after=-1", "warm-up samples must be at least 0, got -1"),
    ],
)
def test_wrong_text_is_refused_in_one_line(text: str, message: str) -> None:
    with refused(message, kind=ValueError):
        make_exchange(text)
