"""docs/tutorials: each page is worked through as its reader would, in one session of a shell.

- A block after a paragraph that says "Save this as `NAME`" is written to that file.
- A block of ```sh is run. Every command must succeed.
- A block of ```text after it is what it prints: each of its lines is in the output, in this order.
  `…` stands for anything. Numbers with a decimal point, numbers with a unit, and digests differ
  from run to run and match any other; ms may be us. Whole numbers have to agree.

Blocks that make an environment and install into it (`INSTALLS`) are not run, because what is
tested is what is installed already: pip would take it from the network, in another version. Any
other block is an error: it would be code that no test has run.
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from hosts import AGENT, require_hosts
from paths import ROOT
from ranks import start
from slurm import Slurm, require_slurm
from tensorflow_environment import keras_variables, tensorflow_python

TUTORIALS = ROOT / "docs" / "tutorials"
CLUSTER = TUTORIALS / "laptop-to-cluster.md"
HERE = Path(sys.executable)
INSTALLS = ("python3 -m venv ", ". ", "pip install ", "export PIP_EXTRA_INDEX_URL=")
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAMED = re.compile(r"[Ss]ave this as `([\w.-]+)`[^\n]*:\s*$")
_DIGEST = r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b"
_TIME = r"\d[\d.]* ?[um]s\b"
_UNITS = r"(?= ?(?:samples/s|MB|GB|KiB|MiB|GiB|s|%)\b)"
_NUMBER = rf"\d+\.[\d.]*\d|\d+{_UNITS}"
_VARYING = re.compile(rf"(?P<all>…)|(?P<digest>{_DIGEST})|(?P<time>{_TIME})|(?P<number>{_NUMBER})")
_FOR = {"all": ".*", "digest": "[0-9a-f]+", "time": r"\d[\d.,]* ?[um]s", "number": r"\d[\d.,]*"}
_END = "== end of step"


@dataclass
class Step:
    code: str
    file: str = ""
    output: str = ""


def steps_of(page: Path) -> list[Step]:
    text = page.read_text(encoding="utf-8")
    found: list[Step] = []
    for block in _BLOCK.finditer(text):
        language, code = block.groups()
        before = text[: block.start()].rpartition("\n\n")[0].rpartition("\n\n")[2]
        named = _NAMED.search(" ".join(before.split()))
        if named:
            found.append(Step(code, file=named[1]))
        elif language == "sh":
            found.append(Step(code))
        elif language == "text" and found and not found[-1].file and not found[-1].output:
            found[-1].output = code
        else:
            raise AssertionError(f"{page.name}: nothing runs or checks this block:\n{code}")
    return [step for step in found if not _installs(step)]


def work_through(
    steps: Sequence[Step],
    directory: Path,
    python: Path,
    env: Mapping[str, object] | None = None,
    timeout_seconds: float = 240,
) -> None:
    """Run steps of a page in a directory, and compare what they print with what the page says."""
    env = dict(env or {})
    folders = [str(env.pop("PATH", "")), str(python.parent), os.environ["PATH"]]
    variables = {"PATH": os.pathsep.join(filter(None, folders)), **env}
    with start(["bash", "-c", _script(steps)], env=variables, cwd=directory) as job:
        done = job.wait(timeout_seconds)
        printed = done.stdout.split(f"\n{_END}\n")
        for step, output in zip(steps, printed, strict=False):
            _compare(step, output)
        if done.returncode != 0:
            job.fail(f"exit code {done.returncode} in step {len(printed)} of {len(steps)}")
        assert len(printed) == len(steps) + 1
        job.assert_nothing_left()


def _installs(step: Step) -> bool:
    return not step.file and all(
        line.startswith(INSTALLS) for line in step.code.splitlines() if line.strip()
    )


def _script(steps: Sequence[Step]) -> str:
    lines = ["exec 2>&1", "set -e -o pipefail"]
    for step in steps:
        written = f"cat > {step.file} <<'END OF FILE'\n{step.code}END OF FILE\n"
        lines += [written if step.file else step.code, f"printf '\\n{_END}\\n'"]
    return "\n".join(lines)


def _compare(step: Step, output: str) -> None:
    real = iter([_flat(line) for line in output.splitlines()])
    for line in map(_flat, step.output.splitlines()):
        if line in ("", "…"):
            continue
        pattern = _pattern(line)
        if not any(pattern.fullmatch(printed) for printed in real):
            raise AssertionError(f"not printed: {line}\nby\n{step.code}\nwhich printed\n{output}")


def _flat(line: str) -> str:
    return " ".join(line.split())


def _pattern(line: str) -> re.Pattern[str]:
    """Return what matches a line of a page: the same but for what differs from run to run."""
    parts, end = [], 0
    for found in _VARYING.finditer(line):
        parts += [re.escape(line[end : found.start()]), _FOR[found.lastgroup or ""]]
        end = found.end()
    return re.compile("".join([*parts, re.escape(line[end:])]))


@pytest.mark.parametrize(
    "name",
    [
        "first-run",
        *(
            pytest.param(n, marks=pytest.mark.soak)
            for n in ("horovod-script", "own-recipe", "survive")
        ),
    ],
)
def test_pages_for_pytorch(name: str, tmp_path: Path) -> None:
    work_through(steps_of(TUTORIALS / f"{name}.md"), tmp_path, HERE)


@pytest.mark.soak
def test_keras(tmp_path: Path) -> None:
    env = keras_variables()
    work_through(steps_of(TUTORIALS / "keras.md"), tmp_path, tensorflow_python(), env)


@pytest.mark.soak
def test_two_hosts(tmp_path: Path) -> None:
    """All but the job: what the page calls ssh leads to hosts that stand in for others."""
    require_hosts()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "ssh").symlink_to(AGENT)
    steps = [step for step in steps_of(CLUSTER) if "sbatch" not in step.code]
    work_through(steps, tmp_path, HERE, {"PATH": tmp_path / "bin"})


@pytest.mark.slurm
def test_the_job(tmp_path: Path) -> None:
    """The script of the page, and its last part."""
    require_slurm()
    (tmp_path / "slurm").mkdir()
    (tmp_path / "work").mkdir()
    steps = [step for step in steps_of(CLUSTER) if step.file or "job.sh" in step.code]
    with Slurm(tmp_path / "slurm"):
        env = {"SLURM_CONF": tmp_path / "slurm" / "slurm.conf"}
        work_through(steps, tmp_path / "work", HERE, env)
