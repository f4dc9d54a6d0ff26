"""Seeds that depend on their purpose, never on the number of ranks or of loader processes."""

from __future__ import annotations

import hashlib
import random
import struct
import sys

import numpy as np

__all__ = ["sample_generator", "sample_seed", "seed_generators", "step_seed"]

_THREE_NUMBERS = struct.Struct("<3Q")
_NUMPY_BITS = 0xFFFF_FFFF


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return the seed for everything random about one sample in one epoch, 64 bits.

    Args:
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in its data set.

    Raises:
        ValueError: a number is negative, or has more than 64 bits.
    """
    return _mixed(b"sample", seed, epoch, index)


def step_seed(seed: int, step: int, part: int) -> int:
    """Return the seed for everything random in one part of a step, 64 bits.

    Args:
        seed: seed of the run.
        step: step, counted from 0 over all epochs.
        part: rank, or number of a virtual shard.

    Raises:
        ValueError: a number is negative, or has more than 64 bits.
    """
    return _mixed(b"step", seed, step, part)


def sample_generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a generator for one sample in one epoch, in 12 microseconds.

    Args:
        seed: seed of the run.
        epoch: epoch, counted from 0.
        index: index of the sample in its data set.
    """
    return np.random.Generator(np.random.PCG64(sample_seed(seed, epoch, index)))


def seed_generators(seed: int) -> None:
    """Seed the global generators of Python and numpy, and of torch if it is imported (local).

    GPUs that torch has not used yet are left alone: queuing a seed for them takes longer than a
    small step of training.

    Args:
        seed: 64-bit seed; numpy's generator takes the lower 32 bits.
    """
    random.seed(seed)
    np.random.seed(seed & _NUMPY_BITS)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.manual_seed(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)


def _mixed(purpose: bytes, *numbers: int) -> int:
    """Hash three numbers: streams of neighboring seeds must be independent."""
    try:
        packed = _THREE_NUMBERS.pack(*numbers)
    except struct.error:
        raise ValueError(f"seeds must be integers from 0 to 2^64 - 1, got {numbers}") from None
    digest = hashlib.blake2b(packed, digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")
