#!/usr/bin/env bash
# polars 2.1.0: the mean of 100 and 100 is -28, if they are in columns of 8 bits.
#
# Seen with polars 2.1.0, Python 3.11: mean_horizontal returns float64, and sum_horizontal a number; both add up in the
# type of the columns, which wraps. The mean of three columns of UInt8 with 200 (pixels, scores, ranks' counts) is 29.3,
# and that of two of Int64 with 2**62 negative. The mean and sum down a column, those of lists and arrays, and of
# groups, are right, as they add up small integers in 64 bits and say so; the documentation of mean_horizontal names no
# limit. A cast to Float64 before it helps. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet polars==2.1.0
"$folder/venv/bin/python" -W error - <<'PYTHON'
import polars as pl

assert pl.__version__ == "2.1.0", pl.__version__
CASES = ((pl.Int8, 2, 100, -28.0), (pl.UInt8, 3, 200, 88 / 3), (pl.Int64, 2, 2**62, -(2.0**62)))
for dtype, columns, number, wrong in CASES:
    data = pl.DataFrame({f"rank{column}": [number] for column in range(columns)}, schema_overrides=dict.fromkeys(
        (f"rank{column}" for column in range(columns)), dtype
    ))
    mean = data.select(pl.mean_horizontal(pl.all())).item()
    total = data.select(pl.sum_horizontal(pl.all())).item()
    down = pl.Series([number] * columns, dtype=dtype).mean()
    lists = data.select(pl.concat_list(pl.all()).list.mean()).item()
    cast = data.select(pl.mean_horizontal(pl.all().cast(pl.Float64))).item()
    print(f"{dtype}, {columns} columns of {number}: mean {mean:.6g}, sum {total}; down a column {down:.6g}, of a list {lists:.6g}")
    assert mean == wrong and total == wrong * columns, "changed"
    assert down == cast == number, "changed: down a column, or cast"
    assert lists == number or dtype == pl.Int64, "changed: lists"
    assert data.lazy().select(pl.mean_horizontal(pl.all())).collect(engine="streaming").item() == wrong, "changed: streaming"
PYTHON
