"""`python -m hvdtrain bench`: it measures, writes what it found, and refuses what makes no sense.

Nothing is asserted of speed; tests/unit/test_bench_*.py test what is made of the times.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from job import Completed
from outcomes import outcomes
from ranks import launch, mpi_python, start

LIMITS = {"memcpy, all ranks at once", "memcpy, one rank alone"}
WAYS = {
    "engine mpi",
    "engine mpi again",
    "engine mpi, deterministic",
    "engine mpi, its memory",
    "engine mpi with numpy, its memory",
    "engine mpi, no shared memory",
    "hvd.allreduce",
    "hvd.allreduce_",
    "gloo all_reduce",
    "mpi4py Allreduce",
    *LIMITS,
}
HOROVOD = "Horovod"


def bench(*words: object, cwd: Path | None = None) -> Completed:
    """Run `python -m hvdtrain bench` to its end; it must leave nothing behind."""
    with start([sys.executable, "-m", "hvdtrain", "bench", *words], cwd=cwd) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    return done


def without_horovod(names: dict[str, Any]) -> set[str]:
    """Return the contenders that are always there."""
    return {name for name in names if not name.startswith(HOROVOD)}


def found(folder: Path) -> dict[str, Any]:
    """Return what was written."""
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


@pytest.mark.bench
def test_steps(tmp_path: Path) -> None:
    words = ["-np", 2, "--quick", "--repeats", 1, "--optimizer", "adam", "--out", tmp_path]
    done = bench("steps", "--model", "mnist-cnn", *words)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    (case,) = result["cases"]
    assert (case["about"]["samples"], case["about"]["optimizer"]) == (64, "adam")
    assert without_horovod(case["values"]) == {
        "one rank, whole batch",
        "one rank alone",
        "no communication",
        "no communication, fused",
        "hvdtrain",
        "hvdtrain again",
        "hvdtrain, fused",
        "hvdtrain, sharded",
        "DDP",
    }
    assert {"hvdtrain", "DDP"} <= set(case["efficiencies"])
    labels = {figure["label"].partition(": ")[2] for figure in result["figures"]}
    assert {"hvdtrain, sharded / no communication, fused", "hvdtrain / DDP"} <= labels
    pictures = "drawn: " in done.stdout
    assert pictures or "pip install 'hvdtrain[bench]'" in done.stdout
    if pictures:
        assert (tmp_path / "steps.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.bench
def test_loop(tmp_path: Path) -> None:
    done = bench("loop", "-np", 2, "--quick", "--repeats", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = found(tmp_path)["results"]
    assert [(result["kind"], result["ranks"]) for result in results] == [("loop", 1), ("loop", 2)]
    for result in results:
        (case,) = result["cases"]
        assert set(case["values"]) == {"by hand", "by hand again", "hvdtrain train"}
        assert all(len(times) == 1 and times[0] > 0 for times in case["values"].values())
        (figure,) = result["figures"]
        ratio = case["values"]["hvdtrain train"][0] / case["values"]["by hand"][0]
        assert figure["number"] == pytest.approx(ratio)


@pytest.mark.bench
def test_exchange(tmp_path: Path) -> None:
    """No byte crosses a network here; a wrong or unequal weight would end the job."""
    words = ["-np", 2, "--quick", "--repeats", 1, "--steps", 1, "--exchange", "local:steps=2"]
    done = bench("exchange", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    (case,) = result["cases"]
    names = ["no communication", "average", "average again", "local:steps=2"]
    assert list(case["values"]) == names
    assert list(case["about"]["sent_bytes"]) == names
    assert list(case["about"]["steps"].values()) == [2, 1, 1, 2]
    assert all(len(times) == 1 and times[0] > 0 for times in case["values"].values())


@pytest.mark.bench
def test_losses_of_exchanges(tmp_path: Path) -> None:
    words = ["-np", 2, "--repeats", 1, "--steps", 4, "--exchange", "local:steps=2"]
    done = bench("exchange", *words, "--loss", "digits", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    (case,) = result["cases"]
    assert list(case["about"]["curves"]) == ["average", "local:steps=2"]
    for name, (curve,) in case["about"]["curves"].items():
        assert [point[0] for point in curve] == [4 * number for number in range(11)]
        assert [point[1] for point in curve] == sorted(point[1] for point in curve)
        assert 0 < curve[-1][2] < curve[0][2] / 2
        assert case["values"][name] == [curve[-1][2]]
    assert (tmp_path / "losses-steps.png").stat().st_size > 0


@pytest.mark.bench
def test_checkpoint(tmp_path: Path) -> None:
    done = bench("checkpoint", "-np", 2, "--quick", "--repeats", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    (result,) = found(tmp_path)["results"]
    assert [case["name"] for case in result["cases"]] == [
        "MNIST CNN, 1.2 M, SGD with momentum",
        "MNIST CNN, 1.2 M, Adam",
    ]
    for case in result["cases"]:
        (steps,) = case["about"]["steps"]
        values = {name: value for name, (value,) in case["values"].items()}
        assert steps >= 8
        assert 0 < values["no checkpoint"] <= values["no checkpoint, longest"]
        assert 0 < values["checkpoint, mean"] <= values["checkpoint, longest"]
        stall = values["checkpoint, longest"] - values["no checkpoint"]
        label = f"{case['name']}: longest step - usual"
        (figure,) = [figure for figure in result["figures"] if figure["label"] == label]
        assert figure["number"] == pytest.approx(1e3 * stall)
        assert figure["met"] == (1e3 * stall < 50)
    assert "[rank" not in done.stderr


@pytest.mark.bench
def test_scaling(tmp_path: Path) -> None:
    words = ["-np", 2, "--quick", "--repeats", 2, "--out", tmp_path, "--sharded"]
    exchanges = ["--exchange", "half:type=bf16", "--exchange", "local:steps=2"]
    done = bench("scaling", *words, *exchanges, "--link", "here", "--link", "hdr")
    assert done.returncode == 0, done.stderr
    scaling = found(tmp_path)["scaling"]
    here, hdr = scaling["links"]
    assert (here["name"], hdr["name"]) == ("this machine", "HDR InfiniBand")
    assert 0 < here["latency_seconds"]["low"] <= here["latency_seconds"]["high"]
    assert hdr["latency_seconds"]["low"] == hdr["latency_seconds"]["high"] == 1.5e-6
    names = ["average", "half:type=bf16", "local:steps=2", "sharded"]
    model = "MNIST CNN, 1.2 M"
    titles = [model, *(f"{model}, {name}" for name in names[1:])]
    assert list(scaling["predictions"]) == titles
    for of_links in scaling["predictions"].values():
        for rows in of_links.values():
            assert [row["ranks"] for row in rows] == [1 << n for n in range(13)]
            assert all(row["seconds"]["low"] <= row["seconds"]["high"] for row in rows)
    alone = scaling["predictions"][model]["this machine"][0]
    assert set(alone["efficiency"].values()) == {1.0}
    assert [check["scheme"] for check in scaling["checks"]] == names
    assert [len(check["turns"]) for check in scaling["checks"]] == [1, 2, 2, 2]
    for check in scaling["checks"]:
        assert check["ranks"] == 2
        assert check["error"] == check["predicted"]["middle"] / check["seconds"] - 1
    assert "half:type=bf16: sends 50 %, in 2 collectives for a bucket, after" in done.stdout
    assert "predicted and measured here" in done.stdout
    assert "of 4 measured steps, and" in done.stdout


def test_scaling_of_given_figures_starts_no_rank(tmp_path: Path) -> None:
    phases = ["--forward-ms", 30, "--backward-ms", 60, "--optimizer-ms", 10, "--megabytes", 100]
    link = ["--latency-us", 0, "--gigabytes", 10, "--jitter-ms", 0]
    ways = ["--exchange", "half", "--exchange", "local:steps=10", "--sharded"]
    done = bench("scaling", *phases, *link, *ways, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "about" not in done.stdout
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
        done = job.wait(300)
        job.assert_nothing_left()
    assert done.returncode == 130
    assert "hvdtrain: interrupted" in done.stderr
    assert "Traceback" not in done.stderr


BAD_INPUT: list[tuple[list[str], str]] = [
    (["nonsense"], "No such command 'nonsense'"),
    (["-np", "1"], "-np 1 must be at least 2"),
    (["steps", "--model", "gpt"], "'gpt' is not one of"),
    (["collectives", "--bytes", "6"], "--bytes 6: give positive multiples of 4"),
    (
        ["exchange", "--exchange", "quarter"],
        "--exchange: exchange 'quarter': the name must be one of",
    ),
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


@pytest.mark.mpich
def test_without_torch_it_says_what_to_install(tmp_path: Path) -> None:
    words = ["-m", "hvdtrain", "bench", "--quick", "--out", tmp_path]
    with start([mpi_python("mpich"), *words]) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    told = "hvdtrain: torch is not installed: pip install 'hvdtrain[torch]'\n"
    assert (done.returncode, done.stderr) == (2, told)


def test_ranks_do_not_start_ranks() -> None:
    with launch(["-m", "hvdtrain", "bench", "--quick"], 2) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    assert done.returncode == 2
    assert done.stderr.count("'bench' starts ranks itself") == 1
