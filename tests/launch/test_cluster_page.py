"""The transcripts of docs/cluster.md, line for line."""

from __future__ import annotations

import os
import re
import shutil
import socket
import sys
from pathlib import Path

import pytest
from ranks import start

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
FOUND = re.findall(r"^```text\n(\$ .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
# The time, and what interfaces a machine has, are its own.
CHANGING = ("--timestamps", "--interface ib0")
# What would change a command line.
SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "SLURM_")
# Variables that ranks get, and that tests set.
OF_TESTS = re.compile(r" -x (HVDTRAIN_\w+|OMP_NUM_THREADS|PYTHONPATH|LD_LIBRARY_PATH)(?= )")
TRANSCRIPTS = [text for text in FOUND if not any(words in text for words in CHANGING)]


@pytest.mark.parametrize("transcript", TRANSCRIPTS, ids=lambda text: text.split("\n")[0])
def test_transcripts(transcript: str, tmp_path: Path) -> None:
    if "/usr/bin/srun" in transcript and not shutil.which("/usr/bin/srun"):
        pytest.skip("no /usr/bin/srun here: apt-get install slurm-client")
    expected = lines(transcript.replace("eth0", socket.if_nameindex()[0][1]))
    commands = [line[2:] for line in expected if line.startswith("$ ")]
    script = "".join(f"cat <<'END'\n$ {command}\nEND\n{command}\n" for command in commands)
    (tmp_path / "train.py").touch()
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    env = dict.fromkeys(name for name in os.environ if name.startswith(SETTINGS)) | {"PATH": path}
    with start(["bash", "-c", f"exec 2>&1\n{script}"], env=env, cwd=tmp_path) as job:
        done = job.wait(300)
        job.assert_nothing_left()
    shown = re.sub(OF_TESTS, "", done.stdout.replace(sys.prefix, "venv"))
    assert lines(shown) == expected


def lines(text: str) -> list[str]:
    """Return those that are not blank."""
    return [line for line in text.split("\n") if line]
