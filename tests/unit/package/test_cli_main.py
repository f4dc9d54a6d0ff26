"""Commands: of packages beside hvdtrain, for programs, and misspelt ones."""

import json
import subprocess
import sys

import pytest

from hvdtrain.core.exchanges.catalog import EXCHANGES


@pytest.mark.parametrize(
    ("name", "package"),
    [("bench", "bench"), ("compare", "bench"), ("lint", "lint"), ("report", "report")],
)
def test_a_command_of_a_package_beside_it(name: str, package: str) -> None:
    """It is found where it is installed; where only hvdtrain is, one line says what to do."""
    help_of = f"from hvdtrain.cli.main import main; main([{name!r}, '--help'])"
    alone = (
        "import sys; from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        f"PathFinder.find_spec = lambda name, *a: None if name == 'hvdtrain_{package}' "
        "else find(name, *a)\n"
    )
    found, missing = (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
        for program in (help_of, alone + help_of)
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"Usage: hvdtrain {name} ")
    assert missing.returncode == 2
    assert missing.stderr.startswith(f"hvdtrain: '{name}' is a command of a package that is ")
    assert missing.stderr.count("\n") == 1


def test_exchanges_are_listed_for_programs() -> None:
    """In a process of its own, because it may import neither a framework nor MPI."""
    program = (
        "import sys; from hvdtrain.cli.main import main\n"
        "try: main(['exchanges', '--json'])\n"
        "finally: assert not {'torch', 'keras', 'tensorflow', 'mpi4py'} & sys.modules.keys()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    listed = json.loads(done.stdout)
    assert list(listed) == list(EXCHANGES)
    assert listed["average"]["options"]["predivide"] == {
        "type": "float",
        "default": 1.0,
        "required": False,
    }
    assert listed["local"]["options"]["steps"]["required"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("trian", "there is no command 'trian': did you mean train? (see 'hvdtrain --help')"),
        ("xyz", "there is no command 'xyz': one of train, evaluate, predict, run, "),
    ],
)
def test_a_misspelt_command(word: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hvdtrain", word], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"hvdtrain: {said}")
    assert len(done.stderr.splitlines()) == 1
