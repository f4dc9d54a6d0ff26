"""Channels of three ranks; what they decide is in tests/unit/core/agreement."""

from pathlib import Path

from ranks import run_ranks

WORKER = Path(__file__).with_name("channel_worker.py")
IN_THREADS = "a_thread_is_not_kept_by_another_that_drives"
CASES = [
    *(IN_THREADS, "what_is_submitted_while_a_rank_joins_is_not_lost"),
    *("an_operation_is_run_whose_submission_is_interrupted",),
    *("requests_that_overlap_are_the_same_everywhere", "names_that_change_do_not_fill_the_memory"),
]


def test_channels_and_reports() -> None:
    run_ranks(WORKER, 3, args=CASES)


def test_several_threads_and_an_mpi_for_one() -> None:
    run_ranks(WORKER, 3, args=[IN_THREADS], env={"MPI4PY_RC_THREAD_LEVEL": "serialized"})
