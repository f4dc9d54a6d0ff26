"""A content that is taken apart and put together again is the same, whatever is in it."""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.train.checkpoint.tensor_file import flatten, unflatten

TENSORS = [
    torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    torch.tensor(2.5),
    torch.zeros(0, 3, dtype=torch.float64),
    np.array([7, 2**32 - 1], np.uint32),
    np.array(True),
]
KEYS = st.one_of(st.text(max_size=3), st.integers(-3, 3), st.sampled_from(["$tensor", "a/b", ""]))
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(TENSORS),
)
CONTENTS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=12,
)


def assert_same(one: Any, other: Any) -> None:
    """Check for equal types and values all the way down; tensors are the very same."""
    assert type(one) is type(other)
    if isinstance(one, (list, tuple)):
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        assert [type(key) for key in one] == [type(key) for key in other]
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, float):
        assert math.isnan(one) if math.isnan(other) else repr(one) == repr(other)
    elif hasattr(one, "shape"):
        assert one is other
    else:
        assert one == other


@settings(deadline=None)
@given(CONTENTS)
def test_what_is_taken_apart_comes_together_again(content: Any) -> None:
    tensors, skeleton = flatten(content)
    text = json.dumps(skeleton, allow_nan=False)
    assert_same(content, unflatten(json.loads(text), tensors))
    for name in tensors:
        name.encode()  # a name is text that any program can read
        assert name != "__metadata__"


def test_names_are_the_keys_that_lead_there() -> None:
    tensors, _ = flatten({"model": {"0.weight": TENSORS[0]}, "state": {0: (TENSORS[1],)}})
    assert list(tensors) == ["model/0.weight", "state/0/0"]


def test_names_that_would_be_one_are_told_apart() -> None:
    content = {"a/b": TENSORS[0], "a": {"b": TENSORS[1]}, "__metadata__": TENSORS[2]}
    tensors, skeleton = flatten(content)
    assert len(tensors) == 3
    assert_same(content, unflatten(skeleton, tensors))


def test_what_stands_for_something_plain_becomes_it() -> None:
    content = {"lr": np.float64(0.5), "steps": np.int64(3), "d": OrderedDict(a=1)}
    tensors, skeleton = flatten(content)
    assert_same({"lr": 0.5, "steps": 3, "d": {"a": 1}}, unflatten(skeleton, tensors))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": [{1, 2}]}, "a/0 is a set, which"),
        ({"a": {"f": print}}, "a/f is a builtin_function_or_method, which"),
        ({"a": {(1, 2): 0}}, r"a has the key \(1, 2\)"),
    ],
)
def test_what_cannot_be_kept_is_named(content: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(content)


@pytest.mark.parametrize("skeleton", [{"$tensor": "x"}, {"$new": 1}, {"$tuple": 1}, {"$dict": 5}])
def test_a_skeleton_that_is_none_is_refused(skeleton: Any) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        unflatten(skeleton, {})
