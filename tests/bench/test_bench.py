"""`python -m hvdtrain bench`: it measures, writes what it found, and refuses what makes no sense.

Nothing is asserted of speed; tests/unit/test_bench_*.py test what is made of the times.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hvdtrain_bench.analysis.judge import OPTIMIZER
from hvdtrain_bench.many.rank import REPORTED, STALLS
from job import Completed
from outcomes import outcomes
from ranks import launch, run_ranks, start
from tensorflow_environment import keras_variables, tensorflow_python

LIMITS = {"memcpy, all ranks at once", "memcpy, one rank alone"}
WAYS = {
    "engine mpi", "engine mpi again", "engine mpi, deterministic", "engine mpi, its memory",
    "engine mpi with numpy, its memory", "engine mpi, no shared memory", "hvd.allreduce",
    "hvd.allreduce_", "gloo all_reduce", "mpi4py Allreduce", *LIMITS,
}  # fmt: skip
HOROVOD = "Horovod"


def bench(
    *words: object, python: str | Path = sys.executable, env: Mapping[str, object] | None = None
) -> Completed:
    return start([python, "-m", "hvdtrain", "bench", *words], env=env).end()


def without_horovod(names: dict[str, Any]) -> set[str]:
    return {name for name in names if not name.startswith(HOROVOD)}


def found(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "bench.json").read_text())
    return document


def test_collectives(tmp_path: Path) -> None:
    words = ["-np", 2, "--quick", "--bytes", 1024, "--bytes", 65536, "--repeats", 2]
    done = bench("collectives", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    document = found(tmp_path)
    assert document["machine"]["cores"] >= 1
    (result,) = document["results"]
    assert (result["kind"], result["ranks"], result["nodes"]) == ("collectives", 2, 1)
    small, large, many, busy = result["cases"]
    assert (small["name"], large["name"]) == ("1 KiB", "64 KiB")
    assert many["about"]["tensors"] == 100
    for case in (small, large):
        assert without_horovod(case["values"]) == WAYS
    assert without_horovod(many["values"]) == {"hvdtrain", "hvdtrain again"}
    assert without_horovod(busy["values"]) == {"hvdtrain", "hvdtrain again", "hvdtrain, busy"}
    for case in result["cases"]:
        assert all(len(times) == 2 and min(times) > 0 for times in case["values"].values())
        assert {row["name"] for row in case["comparisons"]} == set(case["values"])
    for peer in result["peers"]:
        assert peer["library"]
        assert peer["cores"]
        assert (peer["torch_threads"], peer["threads"] > 1) == (1, True)
    horovod_is_here = any(name.startswith(HOROVOD) for name in small["values"])
    assert horovod_is_here != (HOROVOD in result["skipped"])
    assert "same code, too few repeats" in done.stdout


PLAIN = {"no communication", "hvdtrain", "hvdtrain again"}
SHARDED = {*PLAIN, "hvdtrain, sharded"}
ELASTIC = {"not elastic", "not elastic again", "elastic"}
FUSED = {"no communication, fused", "hvdtrain, fused"}
BY_HAND = {"by hand", "by hand again", "hvdtrain train"}
SAVING = {"no checkpoint", "no checkpoint, longest", "checkpoint, mean", "checkpoint, longest"}
# What each kind is told, and what it times in each of its cases.
KINDS: dict[str, tuple[list[str], list[set[str]]]] = {
    "steps": (
        ["--model", "mnist-cnn", "--optimizer", "adam", "--apart"],
        2  # in turns of one job, and in jobs of their own
        * [
            {
                *SHARDED,
                *FUSED,
                "one rank, whole batch",
                "one rank alone",
                "DDP",
                "DDP, batched copies",
                "replicate",
            }
        ],
    ),
    "loop": ([], [BY_HAND, BY_HAND]),  # on one rank and on two
    "exchange": (
        ["--steps", "1", "--exchange", "local:steps=2"],
        [{"no communication", "average", "average again", "local:steps=2"}],
    ),
    "checkpoint": ([], [SAVING, SAVING]),
    "elastic": (["--part", "steps"], [ELASTIC]),
    "keras": (["--backend", "torch"], [{"no communication", "no communication again", "hvdtrain"}]),
    "tensorflow": (
        [],
        [{*SHARDED, OPTIMIZER}, {*SHARDED, OPTIMIZER, "MultiWorkerMirroredStrategy"}],
    ),
}


@pytest.mark.bench
@pytest.mark.parametrize("kind", KINDS)
def test_what_each_kind_times(kind: str, tmp_path: Path) -> None:
    words, expected = KINDS[kind]
    how: dict[str, Any] = {}
    if kind in ("keras", "tensorflow"):
        how = {"python": tensorflow_python(), "env": keras_variables()}
    quick = ["-np", 2, "--quick", "--repeats", 1, "--out", tmp_path]
    done = bench(kind, *words, *quick, **how)
    assert done.returncode == 0, done.stderr
    assert ("an average reads and writes 5 MB on each rank" in done.stdout) == (kind == "steps")
    results = found(tmp_path)["results"]
    cases = [case for result in results for case in result["cases"]]
    assert [without_horovod(case["values"]) for case in cases] == expected
    for case in cases:
        assert all(len(times) == 1 and times[0] > 0 for times in case["values"].values())


@pytest.mark.bench
def test_kills(tmp_path: Path) -> None:
    words = ["--part", "kills", "--kills", 1, "--peer-kills", 0, "-np", 2, "--out", tmp_path]
    done = bench("elastic", *words)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    names = ["hvdtrain train", "hvdtrain, script with hvd.elastic"]
    assert [case["name"] for case in result["cases"]] == names
    for case in result["cases"]:
        new, following, *parts = case["values"].values()
        assert list(case["values"])[2:] == ["noticing", "agreeing", "rebuilding", "retaking"]
        assert sum(part[0] for part in parts) == pytest.approx(new[0])
        assert following == new  # no step is taken again
        (failure,) = case["about"]["failures"]
        assert (failure["again"], failure["twice"], failure["lost"]) == (0, 0, 0)


@pytest.mark.bench
def test_growth_with_the_ranks(tmp_path: Path) -> None:
    done = bench("ranks", "-np", 12, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = found(tmp_path)["results"]
    assert [result["ranks"] for result in results] == [2, 8, 12]
    stalls = [result["extra"]["stalls"] for result in results]
    held = [each["descriptors"] for each in stalls]
    # One for each peer, but at most eight in a set: of 12 ranks, 0 watches 1 to 8, and 10 in its
    # process set. MPI has none for them.
    assert [each - held[0] for each in held] == [0, 6, 8]
    for each in stalls:
        assert each["messages"] > 0
        assert each["reported after"] > 0
        assert min(each[stage]["cpu"] for stage in ("init", "first all-reduce", "shutdown")) > 0
    assert all(result["extra"]["killed"]["ended after"] > 0 for result in results)
    assert all(result["extra"]["goes-on"]["recovery"]["cpu"] > 0 for result in results)


LATE = """
import sys, time
from hvdtrain_bench.many import rank
held = rank._held
def late():
    time.sleep(2 * (rank.context.current().topology.rank == 0))
    return held()
rank._held = late
rank.main(sys.argv[1], rank.KILLED)
"""


def test_no_rank_is_killed_before_all_have_noted(tmp_path: Path) -> None:
    assert launch(["-c", LATE, str(tmp_path)], 3).end().returncode != 0
    assert len(list(tmp_path.glob("*.json"))) == 3


@pytest.mark.soak
def test_256_ranks(tmp_path: Path) -> None:
    (tmp_path / REPORTED).touch()  # no rank waits for it
    run_ranks(["-m", "hvdtrain_bench.many.rank", str(tmp_path), STALLS], 256, timeout_seconds=900)
    notes = [json.loads(file.read_text()) for file in tmp_path.glob("*.json")]
    assert len(notes) == 256
    assert max(each["descriptors"] for each in notes) <= 64
    assert max(each["memory"] for each in notes) <= 65e6


@pytest.mark.bench
def test_losses_of_exchanges(tmp_path: Path) -> None:
    words = ["-np", 2, "--repeats", 1, "--steps", 4, "--exchange", "local:steps=2"]
    done = bench("exchange", *words, "--loss", "digits", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    (case,) = result["cases"]
    assert list(case["about"]["curves"]) == ["average", "local:steps=2"]
    for name, (curve,) in case["about"]["curves"].items():
        assert 0 < curve[-1][2] < curve[0][2] / 2
        assert case["values"][name] == [curve[-1][2]]


@pytest.mark.bench
def test_scaling(tmp_path: Path) -> None:
    words = ["-np", 2, "--quick", "--repeats", 2, "--out", tmp_path, "--sharded"]
    exchanges = ["--exchange", "half:type=bf16", "--exchange", "local:steps=2"]
    done = bench("scaling", *words, *exchanges, "--link", "here", "--link", "hdr")
    assert done.returncode == 0, done.stderr
    scaling = found(tmp_path)["scaling"]
    assert [link["name"] for link in scaling["links"]] == ["this machine", "HDR InfiniBand"]
    names = ["average", "half:type=bf16", "local:steps=2", "sharded"]
    model = "MNIST CNN, 1.2 M"
    titles = [model, *(f"{model}, {name}" for name in names[1:])]
    assert list(scaling["predictions"]) == titles
    for of_links in scaling["predictions"].values():
        for rows in of_links.values():
            assert [row["ranks"] for row in rows] == [1 << n for n in range(13)]
            assert all(row["seconds"]["low"] <= row["seconds"]["high"] for row in rows)
    assert [check["scheme"] for check in scaling["checks"]] == names
    assert [len(check["turns"]) for check in scaling["checks"]] == [1, 2, 2, 2]
    for check in scaling["checks"]:
        assert check["ranks"] == 2
        assert check["error"] == check["predicted"]["middle"] / check["seconds"] - 1


def test_scaling_of_given_figures_starts_no_rank(tmp_path: Path) -> None:
    phases = ["--forward-ms", 30, "--backward-ms", 60, "--optimizer-ms", 10, "--megabytes", 100]
    link = ["--latency-us", 0, "--gigabytes", 10, "--jitter-ms", 0]
    ways = ["--exchange", "half", "--exchange", "local:steps=10", "--sharded"]
    done = bench("scaling", *phases, *link, *ways, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "measuring" not in done.stdout
    scaling = found(tmp_path)["scaling"]
    assert scaling["checks"] == []
    name = "a step of your own, 100 MB"
    plain, half, local, sharded = (of["given"] for of in scaling["predictions"].values())
    assert next(iter(scaling["predictions"])) == name
    for rows in (plain, half, local, sharded):
        assert all(len(set(row["seconds"].values())) == 1 for row in rows)
    assert plain[0]["seconds"]["middle"] == pytest.approx(0.1)
    # What is not hidden is at least the last bucket, and at most all of 2 * 100 MB at 10 GB/s.
    assert 0.1 < plain[-1]["seconds"]["middle"] < 0.12
    # All of it is exposed, every ten steps.
    bound = 0.02 * 4095 / 4096 / 10
    assert local[-1]["seconds"]["middle"] == pytest.approx(0.1 + bound)
    # The optimizer nearly vanishes, and half of the communication is exposed.
    assert 0.09 + 0.01 < sharded[-1]["seconds"]["middle"] < 0.09 + 0.02
    assert "half: sends 50 %" in done.stdout


def test_ctrl_c_is_one_line(tmp_path: Path) -> None:
    words = ["-m", "hvdtrain", "bench", "collectives", "-np", 2, "--out", tmp_path]
    with start([sys.executable, *words]) as job:
        job.wait_for_output("collectives: 1 KiB")
        job.interrupt()
        done = job.ended(code=130)
    assert "hvdtrain: interrupted" in done.stderr
    assert "Traceback" not in done.stderr


BAD_INPUT: list[tuple[list[str], str]] = [
    (["nonsense"], "No such command 'nonsense'"),
    (["-np", "1"], "-np 1 must be at least 2"),
    (["steps", "--model", "gpt"], "'gpt' is not one of"),
    (["collectives", "--bytes", "6"], "--bytes 6: give positive multiples of 4"),
    (["exchange", "--exchange", "quarter"], "exchange 'quarter': the name must be one of"),
    (["scaling", "--gigabytes", "1"], "both --latency-us and --gigabytes"),
    (["scaling", "--forward-ms", "1"], "--backward-ms"),
    (["scaling", "--exchange", "auto"], "--exchange auto: predicted are half, nbit, "),
]


def test_bad_input_is_one_line(tmp_path: Path) -> None:
    found = outcomes([["bench", *words] for words, _ in BAD_INPUT], tmp_path)
    for (_, reason), done in zip(BAD_INPUT, found, strict=True):
        assert (done.returncode, done.stdout) == (2, "")
        assert reason in done.stderr
        assert done.stderr.startswith("hvdtrain: ")
        assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
