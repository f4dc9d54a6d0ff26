"""The code of docs/data.md for torch; that for TensorFlow and Keras runs with their other cases."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks


def test_ranks_get_what_one_gets_with_whole_batches() -> None:
    # Of the 40 samples in the last batch 13, 13 and 14 are for each rank.
    done = run_ranks(Path(__file__).with_name("data_page_worker.py"), 3, warm="torch")
    assert done.results == [done.results[0]] * 3
