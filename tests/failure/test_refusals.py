"""What the system refuses: all ranks say which limit it is, and what to do, and nothing is left."""

from pathlib import Path

from ranks import launch, run_ranks

WORKER = Path(__file__).with_name("refusals_worker.py")
WAYS = ("1", "numpy")


def test_a_rank_without_descriptors_or_memory() -> None:
    """On every rank, at each step of a start and of the making of an optimizer."""
    first, second = run_ranks(WORKER, 2, args=["caught"]).results
    assert first["said"] == second["said"]
    process = f"process {second['process']} on "
    for step, lines in first["said"].items():
        assert all(line == "" or "\n" not in line for line in lines)
        files = ("all 300 files", "ulimit -n 4096")
        words = ("gets no more memory", "ulimit -v") if step.startswith("memory") else files
        for word in (process, *words):
            assert all(word in line for line in lines[:2]), step
    # One for the peer, however many channels there are, and none after the end.
    assert first["watched"] == second["watched"] == {"1": [1, 1, 0], "numpy": [0, 0, 0]}
    assert second["warned"] == []
    hidden, forbidden = first["warned"]
    slower = "hvdtrain: the ranks of this node communicate through MPI, which is slower: "
    assert hidden.startswith(f"{slower}rank 0 and rank 1, both on ")
    assert "cannot read each other's files in /proc: have one user start them" in hidden
    assert forbidden == f"{slower}pidfd_open: Operation not permitted"


def test_a_job_without_descriptors() -> None:
    done = launch(WORKER, 2, args=["uncaught"]).end(code=2)
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "hvdtrain" in line]
    assert line.startswith("hvdtrain: process ")
    assert line.endswith("where the ranks are started")
