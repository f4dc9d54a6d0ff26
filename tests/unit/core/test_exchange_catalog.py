"""Exchanges from text."""

from __future__ import annotations

import re

import pytest

from hvdtrain.core.exchanges.adasum import AdasumExchange
from hvdtrain.core.exchanges.catalog import EXCHANGES, exchange_options, make_exchange


@pytest.mark.parametrize("name", EXCHANGES)
def test_every_exchange_is_made_from_its_name(name: str) -> None:
    """All options have defaults, and every exchange can warm up."""
    options = exchange_options(name)
    assert "warmup" in options
    given = ",".join(f"{key}=1" for key, option in options.items() if option.default is None)
    assert isinstance(make_exchange(f"{name}:{given}"), EXCHANGES[name])


def test_options_are_converted_to_the_types_of_the_arguments() -> None:
    assert make_exchange("average:predivide=2").spec == "allreduce:op=average,predivide=2.0"
    assert make_exchange("adasum: warmup = 3").spec.startswith(f"{AdasumExchange().spec} after 3")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("averag", "exchange 'averag': the name must be one of average, half, adasum"),
        ("average:bits=1", "options are key=value with one of predivide, warmup, got 'bits=1'"),
        ("average:predivide", "got 'predivide'"),
        ("average:predivide=x", "exchange 'average:predivide=x': predivide must be a number"),
        ("adasum:warmup=1.5", "warmup must be a whole number, got 1.5"),
        ("adasum:warmup=1,warmup=2", "warmup is given twice"),
        ("adasum:warmup=-1", "exchange 'adasum:warmup=-1': warm-up steps must be at least 0"),
    ],
)
def test_wrong_text_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        make_exchange(text)
    assert "\n" not in str(caught.value)
