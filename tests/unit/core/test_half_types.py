"""Rounding to half types in numpy, compared with torch's for many and for all unusual values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hvdtrain.arrays import HostArray
from hvdtrain.core.exchanges.half import round_to_half, widen_half
from hvdtrain.types import DType


def some_values() -> HostArray:
    """Return ties, numbers of all magnitudes, and what is not finite, with both signs."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32)
    ties = (bits & 0xFFFF0000) | 0x8000
    fp16_ties = (bits & 0xFFFFE000) | 0x1000
    values = np.concatenate([bits, ties, fp16_ties]).view(np.float32)
    special = np.array([0, 1e-45, 6e-8, 65504, 65520, 3.4e38, np.inf, np.nan], np.float32)
    return np.concatenate([values, special, -special])


@pytest.mark.parametrize("half", [DType.FLOAT16, DType.BFLOAT16])
def test_numpy_rounds_as_torch_does(half: DType) -> None:
    values: Any = some_values()
    tensor: Any = torch.from_numpy(values.copy())
    expected = round_to_half(tensor, half)
    with np.errstate(all="ignore"):
        found = widen_half(round_to_half(values, half), half)
    np.testing.assert_array_equal(found, np.asarray(widen_half(expected, half)))
