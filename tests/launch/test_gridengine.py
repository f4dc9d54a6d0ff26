"""The scripts for Grid Engine, submitted to it: this machine as its only host."""

import re
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from daemons import Scheduler, job_script, require_programs
from run_files import require_each_sample_once, summary_of

from hvdtrain.launch.cluster_environment import free_ports

WORKER = Path(__file__).with_name("job_worker.py")
# Notice is given after 26 seconds, when steps of two seconds are under way; without these a job
# on busy cores is done long before.
OPTIONS = ["--ranks-per-node", 2, "--cpus-per-rank", 1, "--time", "2m", "--notice", "94s"]
HOSTS = """\
#$ -S /bin/bash
#$ -N hosts
#$ -pe mpi 3
#$ -j y
echo "$NSLOTS slots"
{python} -m hvdtrain hosts --from sge
"""
REQUIRED = "HVDTRAIN_TEST_GRIDENGINE"
_PROGRAMS = Path("/usr/lib/gridengine")
_SHARED = Path("/usr/share/gridengine")
_START_SECONDS = 120
_END_SECONDS = 120

_BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {spool}
binary_path {programs}
qmaster_spool_dir {master}
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
_HOST = """\
hostname localhost
load_scaling NONE
complex_values NONE
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""


def require_grid_engine() -> None:
    programs = [str(_PROGRAMS / name) for name in ("sge_qmaster", "sge_execd", "qsub")]
    require_programs(programs, "gridengine-master gridengine-exec gridengine-client", REQUIRED)


class GridEngine(Scheduler):
    """A master, and a host with eight slots and a parallel environment `mpi`.

    Ports and files are their own, and the queue is otherwise what Grid Engine proposes.
    """

    def __init__(self, directory: Path) -> None:
        self._master, self._common = directory / "master", directory / "cell" / "common"
        master, execd = free_ports(2)
        own = {
            "SGE_ROOT": str(directory),
            "SGE_CELL": "cell",
            "SGE_QMASTER_PORT": str(master),
            "SGE_EXECD_PORT": str(execd),
            "SGE_ND": "1",  # stay in the foreground
        }
        # What it would have a person edit, it shows.
        super().__init__(directory, own, {"EDITOR": "cat"})

    def _begin(self) -> None:
        for folder in (self._common, self._master / "job_scripts", self._directory / "tmp"):
            folder.mkdir(parents=True)
        self._write_files()
        master = self._start(str(_PROGRAMS / "sge_qmaster"))
        self.callback(master.process.kill)  # it would take nine seconds to end by itself
        self.wait(lambda: self.ask("qconf", "-sm") == "root", _START_SECONDS)
        self._configure()
        self._start(str(_PROGRAMS / "sge_execd"))
        self.callback(self._end_jobs)

    def submit(self, script: Path) -> str:
        words = ["qsub", "-terse", "-wd", str(script.parent), str(script)]
        return self.ask(*words, check=True).partition(".")[0]

    def ask(self, *words: object, check: bool = False) -> str:
        return super().ask(_PROGRAMS / str(words[0]), *words[1:], check=check)

    def exits(self, job: str) -> list[int]:
        found = re.findall(r"^exit_status +(\d+)", self.ask("qacct", "-j", job), re.MULTILINE)
        return [int(code) for code in found]

    def wait_for_exits(self, job: str, count: int, timeout_seconds: float = 300) -> list[int]:
        """Wait until a job has ended so often, and is not started again; return its exits()."""
        self.wait(lambda: len(self.exits(job)) >= count, timeout_seconds)
        self.wait(lambda: self.ask("qstat", "-j", job) == "", timeout_seconds)
        return self.exits(job)

    def _write_files(self) -> None:
        spool = f"{self._common};{self._master}"
        bootstrap = _BOOTSTRAP.format(spool=spool, programs=_PROGRAMS, master=self._master)
        (self._common / "bootstrap").write_text(bootstrap)
        (self._common / "act_qmaster").write_text("localhost\n")
        # A name that this machine gives to 127.0.0.1 must be that which it gives to itself.
        (self._common / "host_aliases").write_text(f"localhost {socket.gethostname()}\n")
        self.ask("spoolinit", "classic", "libspoolc", spool, "init", check=True)
        changed = _changed(
            (_SHARED / "default-configuration").read_text(),
            administrator_mail="none",
            execd_spool_dir=self._directory / "execd",
            min_uid=0,
            min_gid=0,
            load_report_time="00:00:01",
            reporting_params="accounting=true reporting=false flush_time=00:00:01 joblog=false",
        )
        resources = _SHARED / "util" / "resources"
        self.ask("spooldefaults", "configuration", self._file("configuration", changed), check=True)
        self.ask("spooldefaults", "complexes", str(resources / "centry"), check=True)
        self.ask("spooldefaults", "usersets", str(resources / "usersets"), check=True)
        self.ask("spooldefaults", "managers", "root", check=True)

    def _configure(self) -> None:
        """Tell the master who may submit, where jobs run, and to look at them every second."""
        every = _changed(
            self.ask("qconf", "-ssconf", check=True),
            schedule_interval="0:0:1",
            flush_submit_sec=1,
            flush_finish_sec=1,
            job_load_adjustments="NONE",
        )
        self.ask("qconf", "-Msconf", self._file("scheduler", every), check=True)
        self.ask("qconf", "-as", "localhost", check=True)
        self.ask("qconf", "-Ae", self._file("host", _HOST), check=True)
        self.ask("qconf", "-Ap", str(_SHARED / "util" / "resources" / "pe" / "mpi"), check=True)
        queue = _changed(
            self.ask("qconf", "-aq", "all.q"),
            hostlist="localhost",
            load_thresholds="NONE",
            pe_list="mpi",
            slots=8,
            tmpdir=self._directory / "tmp",
        )
        self.ask("qconf", "-Aq", self._file("queue", queue), check=True)

    def _end_jobs(self) -> None:
        if self.ask("qstat"):
            self.ask("qdel", "-u", "root")
            self.wait(lambda: self.ask("qstat") == "", _END_SECONDS)

    def _file(self, name: str, text: str) -> str:
        path = self._directory / name
        path.write_text(text)
        return str(path)

    def _logs(self) -> Iterable[Path]:
        logs = [self._master / "messages", *self._directory.glob("execd/*/messages")]
        return [*self._directory.parent.glob("*.o*"), *logs]


def _changed(text: str, **values: object) -> str:
    for name, value in values.items():
        text = re.sub(rf"^{name}\s.*$", f"{name} {value}", text, flags=re.MULTILINE)
    return text + "\n"


@pytest.mark.gridengine
def test_generated_scripts(tmp_path: Path) -> None:
    require_grid_engine()
    (tmp_path / "engine").mkdir()
    (tmp_path / "hosts.sh").write_text(HOSTS.format(python=sys.executable))
    with GridEngine(tmp_path / "engine") as engine:
        limited = engine.submit(
            written(tmp_path, "limited", "--array", "2-2", "--", WORKER, "slow")
        )
        hosts = engine.submit(tmp_path / "hosts.sh")
        dies = engine.submit(written(tmp_path, "dies", "--", WORKER, "dies"))
        assert engine.wait_for_exits(hosts, 1) == [0]
        assert engine.wait_for_exits(dies, 1) == [128 + signal.SIGKILL]
        exits = engine.wait_for_exits(limited, 2)
        while exits[-1] == 99:  # a busy machine may need more than 26 seconds for the rest, too
            exits = engine.wait_for_exits(limited, len(exits) + 1)
        assert (set(exits[:-1]), exits[-1]) == ({99}, 0)
    said = (tmp_path / f"hosts.o{hosts}").read_text().splitlines()
    assert said == ["3 slots", "localhost slots=3"]
    assert "places all.q all.q" in (tmp_path / f"dies.o{dies}").read_text()
    # One of an array met its time limit: it saved, went on, and used each sample once.
    assert "was asked to stop" in (tmp_path / f"limited.o{limited}.2").read_text()
    require_each_sample_once(tmp_path)
    summary = summary_of(tmp_path / "runs" / "limited-2")
    assert (summary["samples"], summary["world_size"]) == (2 * 1437, 2)


def written(directory: Path, name: str, *words: object) -> Path:
    return job_script(directory, name, "sge", *OPTIONS, "--python", sys.executable, *words)
