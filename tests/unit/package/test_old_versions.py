"""Frameworks that are too old are refused in one line."""

from __future__ import annotations

import pytest
import torch

from hvdtrain.errors import UsageError
from hvdtrain.torch.versions import require_torch


def test_torch() -> None:
    for version in ("2.4.0", "2.13.0+cpu", "3.0.0a0+git12", torch.__version__):
        require_torch(version)
    line = r"^hvdtrain\.torch needs PyTorch >= 2\.4, found 2\.3\.1\+cpu: pip install 'torch>=2\.4'$"
    with pytest.raises(UsageError, match=line):
        require_torch("2.3.1+cpu")
