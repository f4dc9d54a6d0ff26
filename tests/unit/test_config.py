"""Variables that make no sense are refused by name."""

from __future__ import annotations

import pytest

from hvdtrain.config import Config
from hvdtrain.errors import UsageError

SIZES = ("BUCKET_BYTES", "FIRST_BUCKET_BYTES", "CHUNK_BYTES")


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("text", ["", "0", "-1", "1.5", "1e6", "many"])
def test_sizes_are_positive_numbers(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"HVDTRAIN_{name}='{text}' .*positive"):
        Config.from_environ({f"HVDTRAIN_{name}": text})


def test_a_chunk_fits_into_the_count_of_every_mpi() -> None:
    assert Config.from_environ({"HVDTRAIN_CHUNK_BYTES": "2147483647"}).chunk_bytes == 2**31 - 1
    with pytest.raises(UsageError, match=r"HVDTRAIN_CHUNK_BYTES='2147483648' .*at most 2147483647"):
        Config.from_environ({"HVDTRAIN_CHUNK_BYTES": "2147483648"})
    assert Config.from_environ({"HVDTRAIN_BUCKET_BYTES": "2147483648"}).bucket_bytes == 2**31


def test_defaults() -> None:
    assert Config.from_environ({}) == Config()
