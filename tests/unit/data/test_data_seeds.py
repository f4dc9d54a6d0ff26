"""Seeds: functions of what is drawn for, apart from one another, and spread over all bits."""

from __future__ import annotations

import hashlib
import random
from itertools import product

import numpy as np
import pytest
import torch

from hvdtrain.data import sample_generator, sample_seed, seed_generators, step_seed


def test_seeds_are_the_ones_that_checkpoints_rely_on() -> None:
    numbers = b"".join(number.to_bytes(8, "little") for number in (3, 2, 1))
    for make, purpose in ((sample_seed, b"sample"), (step_seed, b"step")):
        digest = hashlib.blake2b(numbers, digest_size=8, person=purpose).digest()
        assert make(3, 2, 1) == int.from_bytes(digest, "little")
    assert sample_generator(3, 2, 1).integers(1000, size=4).tolist() == [272, 146, 24, 782]


def test_all_seeds_differ() -> None:
    numbers = list(product(range(12), repeat=3))
    seeds = {make(*three) for three in numbers for make in (sample_seed, step_seed)}
    assert len(seeds) == 2 * len(numbers)


def test_neighbours_have_nothing_in_common() -> None:
    draws = np.array([sample_generator(0, 0, index).random(8) for index in range(2000)])
    # Of independent draws: mean 1/2, deviation of the mean 0.2887 / sqrt(2000), no correlation.
    assert np.abs(draws.mean(axis=0) - 0.5).max() < 5 * 0.2887 / 2000**0.5
    neighbours = np.corrcoef(draws[:-1].ravel(), draws[1:].ravel())[0, 1]
    assert abs(neighbours) < 5 / 16000**0.5
    seeds = np.array([step_seed(0, step, 0) for step in range(2000)], dtype=np.uint64)
    bits = np.unpackbits(seeds.view(np.uint8)).reshape(2000, 64).mean(axis=0)
    assert np.abs(bits - 0.5).max() < 5 * 0.5 / 2000**0.5


def test_global_generators() -> None:
    def draw() -> list[float]:
        return [random.random(), float(np.random.rand()), float(torch.rand([]))]

    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        draws = []
        for seed in (2**64 - 1, 5, 2**64 - 1):
            seed_generators(seed)
            draws.append(draw())
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
    assert draws[0] == draws[2]
    assert all(one != other for one, other in zip(draws[0], draws[1], strict=True))


@pytest.mark.parametrize("wrong", [-1, 2**64, 0.5])
def test_wrong_numbers(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"integers from 0 to 2\^64 - 1, got \(0, "):
        sample_seed(0, wrong, 0)
