"""Scripts with hvd.elastic go on when ranks are killed, and when others join."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from job import Completed
from paths import TESTS
from ranks import launch, start
from tensorflow_environment import keras_variables, tensorflow_python

SCRIPT = Path(__file__).parent / "joined_script.py"
KERAS_SCRIPT = TESTS / "scripts" / "horovod_scripts" / "elastic_keras.py"
SAMPLES, LAST_EPOCH = 48, 2
QUICK = {"OMPI_MCA_btl": "^ofi", "OMPI_MCA_mtl": "^ofi"}


def run(
    ranks: int,
    wanted: int,
    victims: Sequence[int],
    *options: object,
    slow: int = -2,
    in_reset: int = -1,
) -> list[dict[str, Any]]:
    words = ["-m", "hvdtrain", "run", "--elastic", "--as-horovod", "-np", ranks, *options]
    words += ["--max-np", wanted] if wanted else []
    numbers = [wanted, slow, in_reset, *victims]
    with start([sys.executable, *words, "--", SCRIPT, *numbers], env=QUICK) as job:
        done = job.ended(600, code=0)
        results = [json.loads(path.read_text()) for path in job.results_folder.glob("*.json")]
    assert len(results) == ranks - len(victims) - (in_reset >= 0)
    everyone: list[dict[str, Any]] = results[0]["payload"]
    told = f"hvdtrain: rank {wanted - 1} joined; {wanted} ranks after "
    assert (told in done.stderr) == (wanted > 0), done.stderr
    return everyone


def require_each_once(everyone: list[dict[str, Any]]) -> None:
    used = Counter(
        sample
        for rank in everyone
        for epoch, samples in rank["used"]
        if epoch == LAST_EPOCH
        for sample in samples
    )
    assert used == Counter(range(SAMPLES))
    assert len({rank["steps"] for rank in everyone}) == 1


def test_a_rank_is_killed_and_another_one_in_a_reset_callback() -> None:
    everyone = run(4, 0, [1], in_reset=2)
    assert [rank["sizes"] for rank in everyone] == [[4, 2]] * 2
    require_each_once(everyone)


@pytest.mark.soak
@pytest.mark.parametrize("slow", [-2, 1])
def test_a_rank_joins_on_a_slot_that_comes(slow: int, tmp_path: Path) -> None:
    """Also while another rank is slow in the operation that says so."""
    program = tmp_path / "hosts"
    program.write_text("#!/bin/sh\necho localhost:3\n")
    program.chmod(0o755)
    everyone = run(2, 3, [], "-H", "localhost:2", "--host-discovery-script", program, slow=slow)
    assert [rank["joined"] for rank in everyone] == [False, False, True]
    assert [rank["sizes"] for rank in everyone] == [[2, 3], [2, 3], [3]]
    require_each_once(everyone)


@pytest.mark.soak
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_replaced(victim: int) -> None:
    everyone = run(2, 2, [victim])
    assert [rank["joined"] for rank in everyone] == [False, True]
    assert [rank["sizes"] for rank in everyone] == [[2, 1, 2], [2]]
    require_each_once(everyone)


def run_failing(how: str) -> Completed:
    words = ["-m", "hvdtrain", "run", "--elastic", "-np", 2, "--max-np", 2]
    script = SCRIPT.with_name("failing_newcomer.py")
    return start([sys.executable, *words, "--", script, how]).end(600)


@pytest.mark.soak
def test_no_rank_can_join() -> None:
    """The others go on, and the job ends well."""
    done = run_failing("raises")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("ValueError: as it was told to") == 3, done.stderr
    assert "a rank that was to join ended: look for its message" in done.stderr, done.stderr


@pytest.mark.soak
def test_a_rank_is_left_alone_before_it_has_the_state() -> None:
    """It does not train from the start as if it were the job."""
    done = run_failing("is left alone")
    assert done.returncode != 0
    assert "no rank is left that has trained: start the job again" in done.stderr, done.stderr


@pytest.mark.soak
@pytest.mark.parametrize(("victim", "wanted"), [(0, 0), (1, 0), (1, 3)])
def test_with_keras(victim: int, wanted: int) -> None:
    """A rank that joins begins with a step that the others take in their reset callback."""
    options = ["--min-np", 2, *(["--max-np", wanted] if wanted else [])]
    words = ["run", "--elastic", "--as-horovod", "-np", 3, *options, "--", KERAS_SCRIPT]
    command = [tensorflow_python(), "-m", "hvdtrain", *words, "--victim", victim]
    with start([*command, "--wanted", wanted], env=QUICK | keras_variables()) as job:
        done = job.ended(600, code=0)
        results = job.results_of_those_left({*range(3)} - {victim})
    assert done.stderr.count(f"rank {victim} of 3 ended; 2 left after ") == 1
    ranks = wanted or 2
    assert results == [{"ranks": ranks, "epoch": 3, "rate": pytest.approx(ranks)}] * 2


KERAS_WORKER = Path(__file__).parent / "elastic_keras_worker.py"
STEPS = [[epoch, batch] for epoch in range(3) for batch in range(4)]
KILLED = [1, 2]


def survive_keras(backend: str, case: str, ranks: int, victim: int) -> list[dict[str, Any]]:
    with launch(
        KERAS_WORKER,
        ranks,
        args=[case, victim],
        python=tensorflow_python(),
        env=keras_variables(backend),
        launcher_args=["--with-ft", "ulfm"],
    ) as job:
        job.ended(600, code=0)
        return job.results_of_those_left({*range(ranks)} - {victim})


@pytest.mark.parametrize(
    ("backend", "case", "ranks", "victim"),
    [
        ("tensorflow", "function", 3, 1),
        pytest.param("tensorflow", "fit", 3, 0, marks=pytest.mark.soak),
        pytest.param("tensorflow", "eager", 3, 2, marks=pytest.mark.soak),
        pytest.param("tensorflow", "fit", 2, 1, marks=pytest.mark.soak),
        pytest.param("torch", "fit", 3, 1, marks=pytest.mark.soak),
        pytest.param("jax", "fit", 3, 0, marks=pytest.mark.soak),
    ],
)
def test_a_rank_is_killed(backend: str, case: str, ranks: int, victim: int) -> None:
    done = survive_keras(backend, case, ranks, victim)
    assert [each["rank"] for each in done] == list(range(ranks - 1))
    for each in done:
        for name, result in each["results"].items():
            again = [KILLED] if name == case else []  # the step that was broken off
            assert result["seen"] == sorted([*STEPS, *again]), name
            assert result["resets"] == ([ranks - 1] if name == case else []), name
