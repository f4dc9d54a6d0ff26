"""Shards of parquet files: each row on one rank, whatever files and row groups there are."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from hvdtrain.data.parquet import read_shard
from hvdtrain.errors import UsageError

FILES = {"part-1": 7, "part-0": 0, "part-2": 12}


def write(folder: Path) -> int:
    """Write tables with the columns number and square, and return the number of rows."""
    first = 0
    for name, rows in sorted(FILES.items()):
        numbers = range(first, first + rows)
        table = pyarrow.table({"number": pyarrow.array(numbers, "int64"), "name": [name] * rows})
        table = table.cast(pyarrow.schema([("number", "int64"), ("name", "string")]))
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=5)
        first += rows
    (folder / "_SUCCESS").touch()
    return first


@pytest.mark.parametrize("size", [1, 2, 3, 4, 25])
def test_each_row_is_of_one_rank(size: int, tmp_path: Path) -> None:
    total = write(tmp_path)
    shards = [read_shard(tmp_path, rank, size) for rank in range(size)]
    numbers = [shard.column("number").to_pylist() for shard in shards]
    assert list(itertools.chain(*numbers)) == list(range(total))
    assert max(map(len, numbers)) - min(map(len, numbers)) <= 1
    assert {tuple(shard.schema.names) for shard in shards} == {("number", "name")}


def test_some_columns(tmp_path: Path) -> None:
    write(tmp_path)
    assert read_shard(tmp_path, 1, 2, ["name"]).schema.names == ["name"]
    with pytest.raises(UsageError, match="has no column weight: number, name"):
        read_shard(tmp_path, 0, 2, ["number", "weight"])


def test_no_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"there are no files \*\.parquet in "):
        read_shard(tmp_path, 0, 1)
