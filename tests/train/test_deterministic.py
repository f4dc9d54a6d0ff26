"""The same bits from run to run, under any bucket plan, and on any number of ranks."""

import json
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import launch, run_ranks

from hvdtrain.core.ordered import branch, tree_sum

WORKER = Path(__file__).with_name("train_worker.py")
# The last one has none, to show that it is they which matter.
SHARDS: list[dict[str, object]] = [
    {"virtual_shards": 4, "optimizer": "sgd"},
    {"virtual_shards": 4, "optimizer": "adam"},
    {},
]
# Samples that are read and changed at random, and a model with dropout.
CHANCE: dict[str, object] = {
    "global_batch_size": 12, "virtual_shards": 4, "optimizer": "adam", "device": "cpu",
    "checkpoint_every": "5 steps", "epochs": 3,
}  # fmt: skip
# In which step it is stopped there, and how many processes of a rank read samples.
STOPS = {1: 7, 2: 13, 4: None}
WORKERS = {1: 0, 2: 2, 4: 0}


def digest(directory: Path, ranks: int, env: Mapping[str, object], *arguments: str) -> str:
    out = directory / str(len(list(directory.iterdir())))
    words = ["-m", "hvdtrain", "train", "digits", "--epochs", "1", "--quiet", "--out", str(out)]
    run_ranks([*words, *arguments], ranks, env=env, warm="torch")
    (text,) = set(json.loads((out / "summary.json").read_text())["weights_sha256"])
    return str(text)


def results_of(ranks: int, directory: Path) -> list[dict[str, Any]]:
    """Train on so many ranks: the cases of SHARDS, and those of CHANCE whole, and in part."""
    common = {"kind": "plain", "lr_scaling": "none", "epochs": 1, "global_batch_size": 52}
    workers = {"kind": "mapped", "workers": WORKERS[ranks]}
    cases: list[dict[str, Any]] = [
        *({**common, **case} for case in SHARDS),
        {**CHANCE, **workers},
        {**CHANCE, **workers, "virtual_shards": None, "epochs": 1},
        {**CHANCE, **workers, "virtual_shards": None, "epochs": 1, "workers": 2 - WORKERS[ranks]},
        {**CHANCE, "kind": "noisy"},
        {**CHANCE, "kind": "noisy", "resume": "auto", "stop": STOPS[ranks], "out": "stopped"},
    ]
    for number, case in enumerate(cases):
        case["out"] = str(directory / str(case.get("out", f"{ranks}-{number}")))
    done = run_ranks(WORKER, ranks, args=[json.dumps(cases)], warm="torch")
    for results in zip(*done.results, strict=True):
        assert len({json.dumps(result.get("weights_sha256")) for result in results}) == 1
    seen = [result[-1]["seen"]["train"] for result in done.results]
    return [{**result, "seen": seen} for result in done.results[0]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("shards")
    return {ranks: results_of(ranks, directory) for ranks in STOPS}


def digests(results: dict[int, list[dict[str, Any]]], case: int) -> set[str]:
    return {digest for found in results.values() for digest in found[case]["weights_sha256"]}


def test_virtual_shards_give_one_result_on_any_number_of_ranks(results: Any) -> None:
    assert [len(digests(results, case)) for case in range(3)] == [1, 1, 3]


def test_so_do_samples_and_dropout_that_are_drawn_at_random(results: Any) -> None:
    """Also where processes of their own read the samples."""
    assert len(digests(results, 3)) == 1
    assert len(digests(results, 4)) == 3  # without shards dropout is a rank's own
    for found in results.values():
        assert found[4]["weights_sha256"] == found[5]["weights_sha256"]
        assert found[3]["final"] == results[1][3]["final"]


def test_a_run_that_goes_on_on_other_numbers_of_ranks_ends_as_if_it_had_not(results: Any) -> None:
    """From 1 rank to 2 and to 4, in the middle of epochs of nine steps."""
    assert len(digests(results, 6)) == 1
    assert [results[ranks][7].get("newest", "")[:18] for ranks in STOPS] == [
        "checkpoint-0000+84",
        "checkpoint-0002+24",
        "",
    ]
    assert results[4][7]["weights_sha256"] == results[4][6]["weights_sha256"]
    assert results[4][7]["final"] == results[1][6]["final"]
    seen = {ranks: results[ranks][7]["seen"] for ranks in STOPS}
    assert sorted(chain(*seen[1], *seen[2], *seen[4])) == sorted([*range(100)] * 3)
    # Of the 16 samples that are left of the first epoch, each of two ranks has eight.
    assert sorted([*seen[1][0], *seen[2][0][:8], *seen[2][1][:8]]) == list(range(100))


def test_the_bucket_plan_and_shared_memory_do_not_matter(tmp_path: Path) -> None:
    digests = {
        digest(tmp_path, 3, {"HVDTRAIN_DETERMINISTIC": 1, "HVDTRAIN_BUCKET_BYTES": nbytes} | more)
        for nbytes, more in ((1 << 20, {}), (3000, {"HVDTRAIN_SHARED_MEMORY": 0}))
    }
    assert len(digests) == 1


@pytest.mark.parametrize(("ranks", "shards", "words"), [(3, 8, "powers of two"), (2, 1, "too few")])
def test_shards_that_do_not_fit(ranks: int, shards: int, words: str) -> None:
    arguments = ["-m", "hvdtrain", "--global-batch-size", "64", "--virtual-shards", str(shards)]
    done = launch(arguments, ranks, warm="torch").end()
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("ranks", range(1, 12))
def test_ranks_that_are_left_go_on_along_the_tree(ranks: int) -> None:
    """Those without a branch add zeros."""
    leaves = list(np.random.default_rng(3).standard_normal((8, 5), dtype=np.float32))
    zeros = np.zeros(5, np.float32)
    parts = [[leaves[term] for term in branch(8, rank, ranks)] for rank in range(ranks)]
    terms = [tree_sum(part) if part else zeros for part in parts]
    assert sum(map(len, parts)) == 8
    assert tree_sum(terms).tobytes() == tree_sum(leaves).tobytes()
