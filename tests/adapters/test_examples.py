"""The programs in examples/, all of them in one launch."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks
from tensorflow_environment import tensorflow_python

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[1] / "examples"
# A session needs graphs without eager mode, for the rest of the process.
LAST = "tensorflow_session.py"


def test_examples(tmp_path: Path) -> None:
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert len(programs) == 5
    assert all(f"[{program}]" in (EXAMPLES / "README.md").read_text() for program in programs)
    done = run_ranks(
        HERE / "examples_worker.py",
        2,
        args=[*(program for program in programs if program != LAST), LAST],
        python=tensorflow_python(),
        env={
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "TF_ENABLE_ONEDNN_OPTS": "0",
        },
        cwd=tmp_path,
        timeout_seconds=180,
    )
    first, second = done.results
    for program in programs:
        assert first[program]["accuracy"] >= 0.9, program
        assert first[program]["weights"] == second[program]["weights"]
        assert bool(first[program]["weights"]) is (program != LAST)
        if program.startswith(("keras", "tensorflow_tape")):  # traced, not called for each batch
            assert 2 <= first[program]["calls"] <= 10
    assert done.stdout.count("on 2 ranks") == len(programs)  # one rank speaks
    assert (tmp_path / "checkpoints" / "digits-5.keras").exists()
    assert list((tmp_path / "checkpoints-session").glob("model.ckpt-200.*"))
