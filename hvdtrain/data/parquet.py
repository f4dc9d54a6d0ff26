"""Exact shards of the rows in parquet files, as Spark and other tools write them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.errors import UsageError

if TYPE_CHECKING:
    import pyarrow

__all__ = ["read_shard"]


@dataclass(frozen=True)
class _RowGroup:
    """Rows that can be read together: `first` is the number of rows in all row groups before it."""

    file: Path
    index: int
    first: int
    rows: int


def read_shard(
    folder: Path | str, rank: int, size: int, columns: Sequence[str] | None = None
) -> pyarrow.Table:
    """Read one rank's rows of all parquet files in a folder (local).

    The n rows of the files, sorted by name, are numbered; a rank's are those from
    n * rank // size to n * (rank + 1) // size. So each row is one rank's, and the numbers of rows
    differ by one at most. Only row groups with such rows are read.

    Args:
        folder: folder that all ranks see; "dataframe.write.parquet(folder)" of Spark makes it.
        rank: rank of this process.
        size: number of ranks.
        columns: names of the columns to read; None: all.

    Returns:
        The rows, in their order.

    Raises:
        UsageError: there are no such files or columns, or pyarrow is missing.
    """
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UsageError("parquet files need pyarrow: pip install pyarrow") from None
    files = sorted(Path(folder).glob("*.parquet"))
    if not files:
        raise UsageError(f"there are no files *.parquet in {folder}")
    groups = list(_row_groups(files, parquet))
    total = sum(group.rows for group in groups)
    start, stop = total * rank // size, total * (rank + 1) // size
    schema = parquet.read_schema(files[0])
    names = schema.names if columns is None else list(columns)
    if missing := [name for name in names if name not in schema.names]:
        raise UsageError(f"{folder} has no column {', '.join(missing)}: {', '.join(schema.names)}")
    parts = []
    for group in groups:
        begin, end = max(start - group.first, 0), min(stop - group.first, group.rows)
        if begin < end:
            rows = parquet.ParquetFile(group.file).read_row_group(group.index, names)
            parts.append(rows.slice(begin, end - begin))
    none = arrow.schema([schema.field(name) for name in names]).empty_table()
    return arrow.concat_tables(parts) if parts else none  # fewer rows than ranks


def _row_groups(files: Sequence[Path], parquet: object) -> Iterator[_RowGroup]:
    first = 0
    for file in files:
        metadata = parquet.read_metadata(file)  # type: ignore[attr-defined]
        for index in range(metadata.num_row_groups):
            rows = metadata.row_group(index).num_rows
            yield _RowGroup(file, index, first, rows)
            first += rows
