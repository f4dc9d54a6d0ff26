"""`python -m hvdtrain job`: whole scripts, as they are in tests/launch/job_scripts."""

import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from ranks import start

from hvdtrain.cli.job import command
from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs import SCHEDULERS
from hvdtrain.launch.sites import sites

FOLDER = Path(__file__).with_name("job_scripts")
PLAIN = ["--nodes", "2", "--gpus-per-node", "4", "--time", "4h", "--python", "python"]
FULL = [
    *("--nodes", "2", "--ranks-per-node", "3", "--cpus-per-rank", "2", "--time", "1d2h30m"),
    *("--notice", "90s", "--name", "digits", "--account", "lab1", "--queue", "short"),
    *("--module", "cuda/12", "--module", "my env", "--python", "/opt/py 3/python"),
]
IMAGE = "registry.example:5000/hvdtrain:1"
SCRIPT = ["--", "train.py", "--lr", "0.1", "it's"]
TRAIN = ["--", "--epochs", "3", "--out=results/here"]
CASES: dict[str, list[str]] = {
    "slurm-srun": ["slurm", *PLAIN],
    "slurm-mpirun": ["slurm", *PLAIN, "--launcher", "mpirun", *TRAIN],
    "slurm-full": ["slurm", *FULL, "--mpi", "pmi2", "--array", "0-3", *TRAIN],
    "pbs": ["pbs", *FULL, "--gpus-per-node", "6", "--array", "0-3", *SCRIPT],
    "lsf-jsrun": ["lsf", *PLAIN], "lsf-mpirun": ["lsf", *PLAIN, "--launcher", "mpirun", *SCRIPT],
    "lsf-full": ["lsf", *FULL, "--array", "1-4", *SCRIPT],
    "sge": ["sge", *FULL, "--array", "1-4", *TRAIN],
    "pjm": ["pjm", *FULL, "--script", "again.sh", *SCRIPT], "flux": ["flux", *PLAIN],
    "oar": ["oar", *FULL, "--stage-env", "/scratch/my archives", *SCRIPT],
    "flux-full": ["flux", *FULL, "--launcher", "mpirun", *TRAIN],
    "k8s": ["k8s", *FULL, "--gpus-per-node", "6", "--image", IMAGE, *SCRIPT],
}  # fmt: skip
AT_SITE = ["--nodes", "2", "--time", "4h", "--account", "lab1", "--python", "python"]
CASES |= {f"site-{name}": ["--site", name, *AT_SITE, *SCRIPT] for name in sites()}
CASES["site-lumi"].insert(0, "slurm")  # may be said, too


def written(words: list[str]) -> str:
    done = CliRunner().invoke(command, words, catch_exceptions=False, standalone_mode=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_scripts(case: str) -> None:
    path = FOLDER / (case + (".yaml" if case.startswith("k8s") else ".sh"))
    assert written(CASES[case]) == path.read_text(encoding="utf-8")


def test_every_script_here_is_written_by_a_case() -> None:
    assert {path.stem for path in FOLDER.iterdir()} == set(CASES)


def test_shellcheck_has_no_objections(tmp_path: Path) -> None:
    found = shutil.which("shellcheck", path=os.path.dirname(sys.executable)) or "shellcheck"
    for path in FOLDER.glob("*.yaml"):
        block = path.read_text(encoding="utf-8").partition("- |\n")[2].partition("volumeMounts:")[0]
        (tmp_path / f"{path.stem}.sh").write_text(textwrap.dedent(block.rstrip(" ")))
    paths = [*FOLDER.glob("*.sh"), *tmp_path.iterdir()]
    assert len(paths) == len(CASES)
    done = start([found, "--shell=bash", *paths]).end()
    assert (done.returncode, done.stdout) == (0, "")


def test_directives_stand_before_all_else_and_alone() -> None:
    """What follows the first command is not read, and PBS takes a comment for a value."""
    for path in FOLDER.glob("*.sh"):
        head, _, rest = path.read_text(encoding="utf-8").partition("\n\n")
        first, *directives = head.split("\n")
        assert first in ("#!/bin/bash", "#!/bin/bash -l")
        assert all(
            re.match(r"#(SBATCH|PBS|BSUB|\$|PJM|OAR) |# flux: ", line) for line in directives
        )
        assert not any("#" in line[1:] for line in directives)
        assert not re.search(r"^(#(SBATCH|PBS|BSUB|\$|PJM|OAR) |# flux: )", rest, re.MULTILINE)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--nodes", "0", "--gpus-per-node", "1"], "--nodes must be at least 1, got 0"),
        ([], "how many ranks on each node?"),
        (["--gpus-per-node", "4", "--ranks-per-node", "3"], "4 GPUs cannot be divided among 3"),
        (["--gpus-per-node", "1", "--time", "soon"], "--time 'soon': write it as 4h"),
        (["--gpus-per-node", "1", "--notice", "4h"], "--notice must be positive"),
        (["--gpus-per-node", "1", "--launcher", "jsrun"], "jsrun is not available with slurm: use"),
        (["--gpus-per-node", "1", "--launcher", "mpirun", "--mpi", "pmi2"], "goes with --launcher"),
        (["--gpus-per-node", "1", "--stage-env", "x"], "--stage-env goes with --launcher mpirun"),
        (["--gpus-per-node", "1", "--name", "a b"], "--name 'a b': write letters"),
        (["--gpus-per-node", "1", "--array", "1,2"], "--array '1,2': write it as 1-4"),
        (["--gpus-per-node", "1", "--", "--epoch", "3"], "No such option"),
        (["--gpus-per-node", "1", "--", "train", "bogus"], "bogus"),
        (["--gpus-per-node", "1", "--", "--epochs", "0"], "epochs"),
        (["--gpus-per-node", "1", "--", "--out"], "requires an argument"),
        (["--gpus-per-node", "1", "--", "--config", "no.yaml"], "no.yaml cannot be read"),
        (["--gpus-per-node", "1", "--", "check"], "'check' cannot be run by ranks"),
        (["--gpus-per-node", "1", "--", "python", "train.py"], "leave out 'python'"),
        (["--gpus-per-node", "1", "--", "--resume", "auto"], "leave out --resume"),
    ],
)
def test_bad_input(words: list[str], reason: str) -> None:
    with pytest.raises((UsageError, click.UsageError), match=re.escape(reason)):
        written(["slurm", "--time", "4h", *words])


def test_options_stand_before_those_of_a_site() -> None:
    script = written(["--site", "lumi", *AT_SITE, "--gpus-per-node", "4", "--queue", "dev-g"])
    assert "#SBATCH --partition=dev-g\n" in script
    assert "#SBATCH --gpus-per-node=4\n" in script
    assert "--cpu-bind" not in script  # its masks are for eight ranks
    assert "srun --kill-on-bad-exit=1 --cpus-per-task=7 --gpu-bind=none python" in script


def test_a_site_replaces_lines_that_are_there() -> None:
    for site in sites().values():
        lines = SCHEDULERS[site.scheduler].directives.splitlines()
        for beginning in site.directives:
            assert sum(line.startswith(beginning) for line in lines) == 1


def test_bad_input_of_sites() -> None:
    with pytest.raises(UsageError, match="--site frontier takes no job without --account"):
        written(["--site", "frontier", "--time", "4h"])
    with pytest.raises(UsageError, match="scheduler 'slum': name one of slurm, pbs"):
        written(["slum", *PLAIN])
    with pytest.raises(UsageError, match="'pbs' cannot be run by ranks"):
        written(["--site", "frontier", *AT_SITE, "--", "pbs"])


def test_the_directory_that_a_file_of_options_names(tmp_path: Path) -> None:
    config = tmp_path / "my options.yaml"
    config.write_text("out: results/there\nresume: auto\n")
    script = written(["slurm", *PLAIN, "--", "--config", str(config), "--set", "width=64"])
    assert "export OUT=results/there\n" in script
    assert f"train --config '{config}' --set width=64 --out \"$OUT\" --resume auto" in script
    script = written(["slurm", *PLAIN, "--", "--config", str(config), "--out", "here"])
    assert "export OUT=here\n" in script


def test_the_python_of_an_image() -> None:
    script = written(["k8s", "--ranks-per-node", "1", "--time", "4h"])
    assert " python -m hvdtrain run -np 1 -hostfile /etc/mpi/hostfile -- train digits" in script


def test_bad_input_of_single_schedulers() -> None:
    with pytest.raises(UsageError, match="scripts for flux cannot have one"):
        written(["flux", *PLAIN, "--array", "1-2"])
    for name in ("lsf", "sge"):
        with pytest.raises(UsageError, match=f"--array 0-3: {name} counts from 1"):
            written([name, *PLAIN, "--array", "0-3"])
    with pytest.raises(UsageError, match="lower-case letters"):
        written(["k8s", *PLAIN, "--name", "Digits"])
    with pytest.raises(UsageError, match="not the name of an image"):
        written(["k8s", *PLAIN, "--image", "a b"])


@pytest.mark.parametrize(
    ("words", "notes"),
    [
        (["slurm", *FULL], []),
        (["sge", *FULL], ["--nodes is not in this script for sge", "--cpus-per-rank is not"]),
        (["pjm", *FULL], ["--cpus-per-rank is not in this script for pjm"]),
        (["lsf", *FULL, "--launcher", "mpirun"], ["--cpus-per-rank is not"]),
        (
            ["k8s", *FULL],
            ["--account is not in this script for k8s", "--module is not", "--queue is not"],
        ),
        (["sge", "--gpus-per-node", "4", "--time", "4h"], ["--gpus-per-node is not"]),
        (["slurm", *FULL, "--image", "x"], ["--image is not in this script for slurm"]),
        (["slurm", *FULL, "--", "nowhere.py"], ["no nowhere.py here: submit the job where it is"]),
        (["slurm", *FULL, "--", "train", "no.py:f"], ["no no.py here: submit the job where it is"]),
        # What is in an image cannot be looked at here.
        (["k8s", *PLAIN, "--", "train", "no.py", "--config", "no.yaml"], []),
    ],
)
def test_what_a_script_leaves_out_is_said(words: list[str], notes: list[str]) -> None:
    said = CliRunner().invoke(command, words, catch_exceptions=False).stderr.splitlines()
    assert len(said) == len(notes)
    assert all(note in line for note, line in zip(notes, said, strict=True))


# A rank that trains until it is told to stop, and one that fails. The first one is ready when the
# time is over: it has the clock of timeout(1), its parent, go off.
STOPS = """#!/bin/bash
trap 'touch "$OUT/requeue"; exit 0' USR1
mkdir -p "$OUT"
[[ ! -e $OUT/requeue ]] || exit 1
kill -ALRM "$PPID"
until false; do sleep 0.05; done
"""


@pytest.mark.parametrize(("ranks", "code"), [(STOPS, 99), ("#!/bin/bash\nexit 7\n", 7)])
def test_the_time_limit(ranks: str, code: int, tmp_path: Path) -> None:
    """A whole script that needs nothing of its scheduler: ranks that are told to stop, or fail."""
    (tmp_path / "python").write_text(ranks)
    (tmp_path / "python").chmod(0o755)
    out = tmp_path / "runs" / "hvdtrain"
    out.mkdir(parents=True)
    (out / "requeue").write_text("of an earlier start")
    words = ["--ranks-per-node", "2", "--time", "1h", "--notice", "1m"]
    (tmp_path / "job.sh").write_text(written(["sge", *words, "--python", str(tmp_path / "python")]))
    start(["bash", "job.sh"], cwd=tmp_path).end(code=code)
    assert (out / "requeue").exists() == (code == 99)
