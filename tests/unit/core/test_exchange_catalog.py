"""Exchanges from text."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest

from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import EXCHANGES, exchange_options, make_exchange
from hvdtrain.core.exchanges.diloco import DiLoCo
from hvdtrain.core.exchanges.local_sgd import LocalSGD, PostLocalSGD
from hvdtrain.core.exchanges.power_sgd import PowerSGDExchange

# For those that need one of two options.
_CHOICES = {"blockmomentum": "steps=1"}


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_is_made_from_its_name(name: str) -> None:
    """All options have defaults, and every exchange can warm up."""
    options = exchange_options(name)
    assert "warmup" in options
    needed = [key for key, option in options.items() if option.required]
    given = ",".join(f"{key}=1" for key in needed) or _CHOICES.get(name, "")
    assert isinstance(make_exchange(f"{name}:{given}"), EXCHANGES[name])


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
        ("average:predivide", "got 'predivide'"),
        ("average:predivide=x", "exchange 'average:predivide=x': predivide must be a number"),
        ("average:predivide=0", "predivide must be a positive number, got 0.0"),
        ("half:predivide=nan", "predivide must be a positive number, got nan"),
        ("adasum:warmup=1.5", "warmup must be a whole number, got 1.5"),
        ("adasum:warmup=1,warmup=2", "warmup is given twice"),
        ("local", "exchange 'local': needs steps="),
        ("local:steps=0", "exchange 'local:steps=0': steps must be at least 1, got 0"),
        ("local:steps=2,state=drop", "state must be one of keep, average, reset, got drop"),
        ("diloco:fragments=2,state=reset", "state=reset needs fragments=1"),
        ("postlocal:after=0,steps=2", "after must be a number of steps above 0, or rate, got 0"),
        ("postlocal:after=9,steps=2,warmup=3", "begins with plain averages by itself"),
        ("blockmomentum", "give block= (samples of all ranks) or steps= (of each rank)"),
        ("blockmomentum:block=4,steps=4", "got block=4 and steps=4"),
        ("blockmomentum:steps=4,momentum=1", "momentum must be at least 0 and less than 1"),
        ("blockmomentum:steps=4,time_constant=9", "time_constant needs block"),
        (
            "blockmomentum:block=4,time_constant=0",
            "time_constant must be a positive number, got 0.0",
        ),
        ("blockmomentum:block=4,time_constant=1e30", "less than 1, got 1.0"),
        (f"blockmomentum:block=1{'0' * 400},time_constant=1", "int too large to convert to float"),
        ("blockmomentum:steps=4,rate=0", "rate must be a positive number, got 0.0"),
        ("blockmomentum:steps=4,rate=inf", "rate must be a positive number, got inf"),
        ("diloco:steps=0", "steps must be at least 1"),
        ("diloco:rate=inf", "rate must be a positive number, got inf"),
        ("diloco:momentum=1", "momentum must be at least 0 and less than 1"),
        ("diloco:type=fp8", "type must be one of float32, bf16, int8, int4, got fp8"),
        ("diloco:fragments=3", "steps must be a multiple of fragments, got steps=500 and"),
        ("nbit:warmup=1,distributed_after=9", "in steps or samples (distributed_after), not both"),
        ("nbit:distributed_after=-1", "warm-up samples must be at least 0, got -1"),
        ("adasum:warmup=-1", "exchange 'adasum:warmup=-1': warm-up steps must be at least 0"),
    ],
)
def test_wrong_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make_exchange(text)
    assert "\n" not in str(caught.value)
