"""Checksums of tensors, and what is said about a difference between ranks."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.train.loop.replica_check import (
    ROW_WORDS,
    array_checksum,
    difference_text,
    multipliers,
    number_checksum,
)
from hvdtrain.train.torch.state import tensor_checksums, torch_checksums

MASK = 2**64 - 1


def by_formula(data: bytes) -> int:
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little", signed=True) for i in range(0, len(data), 8)]
    while True:
        rows = [words[i : i + ROW_WORDS] for i in range(0, len(words), ROW_WORDS)] or [[]]
        words = [row_by_formula(row) for row in rows]
        if len(words) == 1:
            return words[0]


def row_by_formula(row: list[int]) -> int:
    pairs = zip(row, multipliers().tolist(), strict=False)
    total = sum((x ^ (x >> 29)) * m for x, m in pairs) & MASK
    return total - (total >> 63 << 64)


@pytest.mark.parametrize("count", [0, 1, 7, 2 * ROW_WORDS, 2 * ROW_WORDS + 3, 5 * ROW_WORDS - 1])
def test_torch_and_numpy_and_the_formula_agree(count: int) -> None:
    values = np.random.default_rng(count).standard_normal(count).astype(np.float32)
    expected = by_formula(values.tobytes())
    assert array_checksum(values) == expected
    assert tensor_checksums([torch.from_numpy(values)]) == [expected]


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "int64", "uint8", "bool", "complex64"]
)
def test_any_type_and_any_place_in_memory(dtype: str) -> None:
    values = (np.arange(60) % 7).astype(dtype)
    expected = array_checksum(values)
    everything = torch.from_numpy(np.concatenate([values[:1], values]))
    unaligned, columns = everything[1:], torch.from_numpy(values.reshape(6, 10).T.copy()).T
    assert tensor_checksums([unaligned, columns]) == [expected, expected]


@given(st.integers(0, 99), st.integers(0, 99), st.integers(0, 31), st.integers(0, 31))
def test_one_or_two_bits_always_show(first: int, second: int, high: int, low: int) -> None:
    values = np.random.default_rng(5).standard_normal(100).astype(np.float32)
    changed = values.copy()
    changed.view(np.uint32)[first] ^= np.uint32(1 << high)
    assert array_checksum(changed) != array_checksum(values)
    if (first, high) != (second, low):
        changed.view(np.uint32)[second] ^= np.uint32(1 << low)
        assert array_checksum(changed) != array_checksum(values)


def checksums(change: Any = None, optimizer: type[torch.optim.Optimizer] = torch.optim.Adam) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    made = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    model(torch.randn(4, 3)).square().sum().backward()
    made.step()
    if change is not None:
        with torch.no_grad():
            change(model, made)
    return torch_checksums(model, made, {"step": 1})


def state(optimizer: Any, number: int, key: str) -> Any:
    return optimizer.state[optimizer.param_groups[0]["params"][number]][key]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("weight '0.weight'", lambda m, o: m[0].weight[1, 2].mul_(1 + 1e-6)),
        ("weight '1.bias'", lambda m, o: m[1].bias[0].neg_()),
        ("exp_avg of '0.weight'", lambda m, o: state(o, 0, "exp_avg")[0, 0].add_(1e-3)),
        ("exp_avg_sq of '1.bias'", lambda m, o: state(o, 3, "exp_avg_sq")[0].add_(1e-3)),
        ("step of '0.bias'", lambda m, o: state(o, 1, "step").add_(1)),
        ("learning rate of group 0", lambda m, o: o.param_groups[0].update(lr=0.1 + 1e-15)),
    ],
)
def test_everything_that_must_be_equal_counts(name: str, change: Any) -> None:
    before, after = checksums(), checksums(change)
    assert [key for key in before if before[key] != after[key]] == [name]


def test_running_statistics_and_equal_runs_do_not_differ() -> None:
    assert checksums() == checksums(lambda m, o: m[1].running_mean.add_(1))
    assert number_checksum(1.0) != number_checksum(2.0)


def test_a_difference_is_told_with_the_first_name_and_the_ranks() -> None:
    good, other = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 4, "c": 5}
    text = difference_text([good, other, good, good])
    assert text == "b on rank 1 is not that of the other 3 ranks (2 of 3 checksums differ)"
    text = difference_text([other, good, good, {**good, "c": 9}, good])
    assert text == "b on rank 0 is not that of the other 4 ranks (2 of 3 checksums differ)"
    assert difference_text([good, other]).startswith("b differs between ranks 0, 1 (")
    lacking = {"a": 1, "b": 2}
    text = difference_text([good, lacking, lacking, lacking, good])
    assert text.startswith("c on ranks 0, 4 is not that of the other 3 ranks (1 of 3")
