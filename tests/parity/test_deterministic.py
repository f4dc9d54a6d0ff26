"""The same bits from run to run, under any bucket plan, and on any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import launch, run_ranks

from hvdtrain.core.ordered import tree_sum

WORKER = Path(__file__).with_name("train_worker.py")
# The last one has none, to show that it is they which matter.
SHARDS: list[dict[str, object]] = [
    {"virtual_shards": 4, "optimizer": "sgd"},
    {"virtual_shards": 4, "optimizer": "adam"},
    {},
]
ORDER_MATTERS = [1e8, 1.0, -1e8, 1.0]


def digest(directory: Path, ranks: int, env: Mapping[str, object], *arguments: str) -> str:
    """Train and return the digest of the weights."""
    out = directory / str(len(list(directory.iterdir())))
    words = ["-m", "hvdtrain", "train", "digits", "--epochs", "1", "--quiet", "--out", str(out)]
    run_ranks([*words, *arguments], ranks, env=env, timeout_seconds=120)
    summary = json.loads((out / "summary.json").read_text())
    (text,) = set(summary["weights_sha256"])
    return str(text)


def digests_of(ranks: int, directory: Path) -> list[str]:
    """Train the cases of SHARDS on so many ranks and return the digest of each one's weights."""
    common = {"kind": "plain", "lr_scaling": "none", "epochs": 1, "global_batch_size": 52}
    cases = [
        {**common, **case, "out": str(directory / f"{ranks}-{number}")}
        for number, case in enumerate(SHARDS)
    ]
    done = run_ranks(WORKER, ranks, args=[json.dumps(cases)], timeout_seconds=120)
    shown = [[set(summary["weights_sha256"]) for summary in results] for results in done.results]
    assert shown == [shown[0]] * ranks
    return [text for (text,) in shown[0]]


def test_virtual_shards_give_one_result_on_any_number_of_ranks(tmp_path: Path) -> None:
    sgd, adam, without = zip(*(digests_of(ranks, tmp_path) for ranks in (1, 2, 4)), strict=True)
    assert (len(set(sgd)), len(set(adam)), len(set(without))) == (1, 1, 3)


def test_the_bucket_plan_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    digests = {
        digest(tmp_path, 3, {"HVDTRAIN_DETERMINISTIC": 1, "HVDTRAIN_BUCKET_BYTES": nbytes} | more)
        for nbytes, more in ((1 << 20, {}), (3000, {"HVDTRAIN_SHARED_MEMORY": 0}))
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    ("ranks", "shards", "words"),
    [(3, 8, "powers of two"), (2, 6, "powers of two"), (2, 1, "too few")],
)
def test_shards_that_do_not_fit(ranks: int, shards: int, words: str) -> None:
    arguments = ["-m", "hvdtrain", "--global-batch-size", "64", "--virtual-shards", str(shards)]
    with launch(arguments, ranks) as job:
        done = job.wait(60)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_order_matters_and_is_a_tree() -> None:
    terms = [np.array([value], np.float32) for value in ORDER_MATTERS]
    assert tree_sum(terms)[0] == np.float32(np.float32(1e8 + 1.0) + np.float32(-1e8 + 1.0))
    assert tree_sum(terms)[0] != sum(ORDER_MATTERS)


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=8, max_size=8))
def test_branches_of_a_tree_add_up_to_the_tree(values: list[float]) -> None:
    leaves = [np.array([value], np.float32) for value in values]
    whole = tree_sum(leaves)
    for ranks in (2, 4, 8):
        each = 8 // ranks
        branches = [tree_sum(leaves[rank * each :][:each]) for rank in range(ranks)]
        assert tree_sum(branches).tobytes() == whole.tobytes()
