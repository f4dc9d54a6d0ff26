"""`python -m hvdtrain script`: the script sees what it would see without it."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ranks import launch, start

import hvdtrain
from hvdtrain.horovod.names import on_path

SCRIPT = [sys.executable, "-m", "hvdtrain", "script"]
OURS = on_path.__path__[0]
# Where this hvdtrain is imported from, for a script with a path of its own.
IMPORTED = [str(Path(hvdtrain.__file__).parents[1])]
LOOK = """
import os, sys
import beside
ours = [entry for entry in sys.path if "on_path" in entry]
path = [entry for entry in sys.path if entry not in ours]
print(sys.argv, path, sys.flags, sys.warnoptions, __name__, __file__, __spec__, beside.__file__)
print("out", flush=True)
print("err", file=sys.stderr)
"""
ENDS = {
    "normally": "",
    "with a code": "sys.exit(7)",
    "with a message": "sys.exit('no')",
    "with an exception": "def f():\n    raise ValueError(5)\nf()",
    "of a signal": "os.kill(os.getpid(), 9)",
}


def outcome(command: list[object], cwd: Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, timeout=300, cwd=cwd
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_it_is_as_if_python_had_started_it(end: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "beside.py").touch()
    (folder / "look.py").write_text(LOOK + ENDS[end])
    words = ["folder/look.py", "--as-horovod", "-x", "--", "a b", ""]
    options = ["-u", "-O", "-W", "ignore"]
    plain = outcome([sys.executable, *options, *words], tmp_path)
    assert outcome([sys.executable, *options, *SCRIPT[1:], *words], tmp_path) == plain
    assert plain[0] == {"normally": 0, "with a code": 7, "of a signal": -9}.get(end, 1)
    assert "out" in plain[1]


def which_horovod(*options: object, cwd: Path, path: Path | None = None) -> str:
    scripts = cwd / "scripts"
    scripts.mkdir(exist_ok=True)
    (scripts / "child.py").write_text("import horovod; print(horovod.__file__)")
    text = (
        "import subprocess, sys; subprocess.run([sys.executable, 'scripts/child.py'], check=True)"
    )
    (scripts / "script.py").write_text(text)
    env = {} if path is None else {"PYTHONPATH": os.pathsep.join([str(path), *IMPORTED])}
    done = start([*SCRIPT, *options, "scripts/script.py"], cwd=cwd, env=env).end()
    assert (done.returncode, done.stderr) == (0, "")
    return str(Path(done.stdout.strip()).parent.parent)


def test_an_installed_horovod_is_left_alone(tmp_path: Path) -> None:
    """Unless it is told otherwise; what lies in the working directory is not installed."""
    for folder in ("here", "installed"):
        (tmp_path / folder / "horovod").mkdir(parents=True)
        (tmp_path / folder / "horovod" / "__init__.py").touch()
    here, installed = tmp_path / "here", tmp_path / "installed"
    assert which_horovod(cwd=here) == OURS
    assert which_horovod(cwd=here, path=installed) == str(installed)
    assert which_horovod("--as-horovod", cwd=here, path=installed) == OURS


def test_a_script_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    expected = f"hvdtrain: no script gone.py on {socket.gethostname()}: name an existing file"
    with start([*SCRIPT, "gone.py"]) as job:
        done = job.wait()
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected + "\n")
    done = launch(SCRIPT[1:], 2, args=["gone.py"]).end(code=2)
    assert done.stderr.count("hvdtrain: ") == done.stderr.count(expected) == 1


def test_as_horovod_is_for_scripts() -> None:
    done = start([sys.executable, "-m", "hvdtrain", "run", "--as-horovod", "-np", 2]).end()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch("hvdtrain: --as-horovod is for a script: .*\n", done.stderr)
