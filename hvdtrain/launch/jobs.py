"""Job scripts for schedulers and Kubernetes: directives, the launch, and how a job starts again."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_ARRAY = re.compile(r"(\d+)-(\d+)")
_UNITS = (86400, 3600, 60, 1)


@dataclass(frozen=True)
class JobRequest:
    """A job to be submitted."""

    name: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int
    cpus_per_rank: int
    seconds: int
    notice_seconds: int
    launcher: str
    mpi: str
    account: str
    queue: str
    array: str
    modules: Sequence[str]
    python: str
    script: str
    image: str
    out: str
    arguments: Sequence[str]
    trains: bool

    def __post_init__(self) -> None:
        words = {"--name": self.name, "--script": self.script}
        words |= {"--account": self.account, "--queue": self.queue, "--mpi": self.mpi}
        for option, word in words.items():
            optional = option not in ("--name", "--script")
            if (word or not optional) and not _NAME.fullmatch(word):
                raise UsageError(f"{option} {word!r}: write letters, digits, '.', '_' and '-'")
        counts = {"--nodes": self.nodes, "--cpus-per-rank": self.cpus_per_rank}
        for option, count in counts.items():
            if count < 1:
                raise UsageError(f"{option} must be at least 1, got {count}")
        if self.ranks_per_node < 1:
            raise UsageError(
                "how many ranks on each node? Pass --gpus-per-node or --ranks-per-node"
            )
        if self.gpus_per_node % self.ranks_per_node:
            raise UsageError(
                f"{self.gpus_per_node} GPUs cannot be divided among {self.ranks_per_node} ranks: "
                "give a rank one GPU, or the same number to each"
            )
        if self.seconds < 1:
            raise UsageError("--time must be positive")
        if not 0 < self.notice_seconds < self.seconds:
            raise UsageError("--notice must be positive and shorter than --time")
        if self.mpi and self.launcher != "srun":
            raise UsageError(f"--mpi {self.mpi} goes with --launcher srun only")
        if self.array and not _counts_up(self.array):
            raise UsageError(f"--array {self.array!r}: write it as 1-4")

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def cpus_per_node(self) -> int:
        """Number of cores for all ranks of a node."""
        return self.ranks_per_node * self.cpus_per_rank


def _counts_up(array: str) -> bool:
    match = _ARRAY.fullmatch(array)
    return match is not None and int(match[1]) <= int(match[2])


def parse_seconds(text: str, option: str) -> int:
    """Return the seconds of "4h", "1h30m", "90m" or "1d"."""
    match = _TIME.fullmatch(text)
    if not text or match is None:
        raise UsageError(f"{option} {text!r}: write it as 4h, 90m, 1h30m or 1d")
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), _UNITS, strict=True))


def clock_text(seconds: int) -> str:
    """Return HH:MM:SS, with more than 24 hours if need be."""
    return f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"


# Exit codes that mean "start it again" to schedulers that check them.
AGAIN = 75
_SGE_AGAIN = 99


def _nothing(request: JobRequest) -> list[str]:
    return []


@dataclass(frozen=True)
class Scheduler:
    """How to write scripts for a scheduler."""

    launchers: Sequence[str]
    directives: Callable[[JobRequest], list[str]]
    again: Callable[[JobRequest], list[str]]
    array: str = ""
    first: int = 0
    warns: str = ""
    setup: Callable[[JobRequest], list[str]] = _nothing
    hostfile: str = ""
    unsaid: Callable[[JobRequest], Mapping[str, str]] = lambda request: {}


def _slurm(request: JobRequest) -> list[str]:
    many = "-%a" if request.array else ""
    number = "%A" if request.array else "%j"
    options = {
        "job-name": request.name,
        "account": request.account,
        "partition": request.queue,
        "nodes": request.nodes,
        "ntasks-per-node": request.ranks_per_node,
        "gpus-per-node": request.gpus_per_node,
        "cpus-per-task": request.cpus_per_rank,
        "time": clock_text(request.seconds),
        "signal": f"B:USR1@{request.notice_seconds}",
        "open-mode": "append",
        "output": f"%x-{number}{many}.out",
        "array": request.array,
    }
    given = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    return [*given, "#SBATCH --requeue"]


def _slurm_again(request: JobRequest) -> list[str]:
    job = "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if request.array else "$SLURM_JOB_ID"
    return [f'scontrol requeue "{job}"']


def _pbs(request: JobRequest) -> list[str]:
    gpus = f":ngpus={request.gpus_per_node}" if request.gpus_per_node else ""
    sizes = f"ncpus={request.cpus_per_node}:mpiprocs={request.ranks_per_node}{gpus}"
    options = [
        f"-N {request.name}",
        request.account and f"-A {request.account}",
        request.queue and f"-q {request.queue}",
        f"-l select={request.nodes}:{sizes}",
        "-l place=scatter",
        f"-l walltime={clock_text(request.seconds)}",
        "-j oe",
        "-r y",
        request.array and f"-J {request.array}",
    ]
    return [f"#PBS {option}" for option in options if option]


def _pbs_again(request: JobRequest) -> list[str]:
    if request.array:
        return ['echo "$OUT is not done: submit this job of the array again" >&2']
    return _submit("qsub")(request)


def _lsf(request: JobRequest) -> list[str]:
    jsrun = request.launcher == "jsrun"
    minutes = -(-request.seconds // 60)
    many = f"[{request.array}]" if request.array else ""
    options = [
        f'-J "{request.name}{many}"',
        request.account and f"-P {request.account}",
        request.queue and f"-q {request.queue}",
        f"-W {minutes // 60}:{minutes % 60:02}",
        f"-nnodes {request.nodes}" if jsrun else f"-n {request.ranks}",
        "" if jsrun else f'-R "span[ptile={request.ranks_per_node}]"',
        f'-gpu "num={request.gpus_per_node}"' if request.gpus_per_node and not jsrun else "",
        f"-o {request.name}-%J{'-%I' if request.array else ''}.out",
        f"-Q {AGAIN}",
    ]
    return [f"#BSUB {option}" for option in options if option]


def _unsaid_lsf(request: JobRequest) -> dict[str, str]:
    if request.launcher == "jsrun":
        return {}
    return {"cpus_per_rank": "a rank has one slot, of as many cores as the site says"}


def _sge(request: JobRequest) -> list[str]:
    options = [
        # Many queues ignore the first line of a script, and run it with sh or csh.
        "-S /bin/bash",
        f"-N {request.name}",
        request.account and f"-P {request.account}",
        request.queue and f"-q {request.queue}",
        f"-pe mpi {request.ranks}",
        f"-l h_rt={clock_text(request.seconds)}",
        "-cwd",
        "-j y",
        "-r y",
        request.array and f"-t {request.array}",
    ]
    return [f"#$ {option}" for option in options if option]


def _unsaid_sge(request: JobRequest) -> dict[str, str]:
    return {
        "nodes": "in '-pe mpi' name an environment of the site that puts as many ranks on a host",
        "gpus_per_node": "add the site's line for them, such as '#$ -l gpu=4'",
        "cpus_per_rank": "in '-pe mpi' name an environment of the site that gives a rank its cores",
    }


def _pjm(request: JobRequest) -> list[str]:
    options = [
        f"-N {request.name}",
        request.account and f"-g {request.account}",
        request.queue and f"-L rscgrp={request.queue}",
        f"-L node={request.nodes}",
        f"-L elapse={clock_text(request.seconds)}",
        f"--mpi proc={request.ranks}",
        "-j",
        "-S",
    ]
    return [f"#PJM {option}" for option in options if option]


def _unsaid_pjm(request: JobRequest) -> dict[str, str]:
    return {
        "gpus_per_node": "name a resource group with as many in --queue",
        "cpus_per_rank": "ranks share the cores of a node",
    }


def _pjm_setup(request: JobRequest) -> list[str]:
    slots = request.ranks_per_node
    return [
        "export OMPI_MCA_plm_rsh_agent=/bin/pjrsh PRTE_MCA_plm_ssh_agent=/bin/pjrsh",
        'hosts=hosts-"$PJM_JOBID"',
        f'{shlex.quote(request.python)} -m hvdtrain hosts --from pjm --slots {slots} > "$hosts"',
    ]


def _flux(request: JobRequest) -> list[str]:
    options = [
        f"--job-name={request.name}",
        request.account and f"--bank={request.account}",
        request.queue and f"--queue={request.queue}",
        f"-N{request.nodes}",
        "--exclusive",
        f"-t {-(-request.seconds // 60)}m",
        f"--signal=USR1@{request.notice_seconds}s",
        f"--output={request.name}-{{{{id}}}}.out",
    ]
    return [f"# flux: {option}" for option in options if option]


def _exit(code: int) -> Callable[[JobRequest], list[str]]:
    return lambda request: [f"exit {code}"]


def _submit(command: str) -> Callable[[JobRequest], list[str]]:
    return lambda request: [
        "# The name under which this script was saved, in the directory of the job.",
        f"{command} {request.script}",
    ]


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        ("srun", "mpirun"), _slurm, _slurm_again, array="SLURM_ARRAY_TASK_ID", warns="shell"
    ),
    "pbs": Scheduler(
        ("mpirun",),
        _pbs,
        _pbs_again,
        array="PBS_ARRAY_INDEX",
        setup=lambda request: ['cd "$PBS_O_WORKDIR" || exit'],
    ),
    "lsf": Scheduler(
        ("jsrun", "mpirun"),
        _lsf,
        _exit(AGAIN),
        array="LSB_JOBINDEX",
        first=1,
        unsaid=_unsaid_lsf,
    ),
    "sge": Scheduler(
        ("mpirun",),
        _sge,
        _exit(_SGE_AGAIN),
        array="SGE_TASK_ID",
        first=1,
        unsaid=_unsaid_sge,
    ),
    "pjm": Scheduler(
        ("mpirun",),
        _pjm,
        _submit("pjsub"),
        setup=_pjm_setup,
        hostfile='"$hosts"',
        unsaid=_unsaid_pjm,
    ),
    "flux": Scheduler(("flux", "mpirun"), _flux, _submit("flux batch"), warns="all"),
}


# The scheduler sends USR1 to this shell. The trap interrupts `wait`, which is called again.
_PASSED_ON = """\
trap 'kill -USR1 "$pid"' USR1
{launch} &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?
"""
# The scheduler sends USR1 to the ranks, and to this shell, which must survive it.
_WARNED = """\
trap : USR1
{launch}
code=$?
"""
_TIMED = """\
timeout --preserve-status --signal=USR1 {seconds} \\
  {launch}
code=$?
"""
_FORMS = {"shell": _PASSED_ON, "all": _WARNED, "": _TIMED}
_END = """\

if [[ -e $OUT/requeue ]]; then
{again}
fi
exit "$code"
"""


def job_script(name: str, request: JobRequest) -> str:
    """Return the script for a scheduler."""
    scheduler = SCHEDULERS[name]
    head = ["#!/bin/bash", *scheduler.directives(request), "", ""]
    return "\n".join(head) + body(request, scheduler)


def body(request: JobRequest, scheduler: Scheduler) -> str:
    """Return the lines that the shell of a job runs."""
    index = f'"-${scheduler.array}"' if request.array else ""
    lines = [
        "# Modules and variables of this site belong here.",
        *(f"module load {shlex.quote(module)}" for module in request.modules),
        "ulimit -c 0",
        *scheduler.setup(request),
        f"export OMP_NUM_THREADS={request.cpus_per_rank}",
        f"export OUT={shlex.quote(request.out)}{index}",
        'rm -f "$OUT/requeue"',
        "",
    ]
    start = _FORMS[scheduler.warns].format(
        launch=_launch_line(request, scheduler.hostfile),
        seconds=request.seconds - request.notice_seconds,
    )
    again = "\n".join(f"  {line}" for line in scheduler.again(request))
    return "\n".join([*lines, start]) + _END.format(again=again)


def _launch_line(request: JobRequest, hostfile: str = "") -> str:
    """Return the command that starts all ranks, in bash."""
    words = {"mpirun": _mpirun, "srun": _srun, "jsrun": _jsrun, "flux": _flux_lines}[
        request.launcher
    ]
    parts = [shlex.join(words(request))]
    if hostfile:
        if not request.trains:  # a user's script writes its requeue marker there
            parts.append("-x OUT")
        parts.append(f"-hostfile {hostfile}")
    if request.launcher == "mpirun":
        parts.append("--")
    parts.append(shlex.join(request.arguments))
    if request.trains:
        parts.append('--out "$OUT" --resume auto')
    return " ".join(parts)


def _program(request: JobRequest) -> list[str]:
    return [request.python, "-m", "hvdtrain"]


def _mpirun(request: JobRequest) -> list[str]:
    # `hvdtrain run` finds the mpirun of the loaded MPI, and builds its command line.
    return [*_program(request), "run", "-np", str(request.ranks)]


def _srun(request: JobRequest) -> list[str]:
    # A rank that fails must end all. Every rank sees all GPUs of its node and takes its own: hidden
    # from each other, GPUs have no peer access.
    gpus = ["--gpu-bind=none"] if request.gpus_per_node else []
    mpi = [f"--mpi={request.mpi}"] if request.mpi else []
    cpus = f"--cpus-per-task={request.cpus_per_rank}"
    return ["srun", *mpi, "--kill-on-bad-exit=1", cpus, *gpus, *_program(request)]


def _jsrun(request: JobRequest) -> list[str]:
    each = {
        "-n": request.ranks,
        "-r": request.ranks_per_node,
        "-a": 1,
        "-g": request.gpus_per_node // request.ranks_per_node,
        "-c": request.cpus_per_rank,
        "-b": "rs",
        "-d": "packed",
    }
    return ["jsrun", *(str(word) for pair in each.items() for word in pair), *_program(request)]


def _flux_lines(request: JobRequest) -> list[str]:
    sizes = [f"-N{request.nodes}", f"-n{request.ranks}", f"-c{request.cpus_per_rank}"]
    if gpus := request.gpus_per_node // request.ranks_per_node:
        sizes += [f"-g{gpus}", "-o", "gpu-affinity=per-task"]
    return ["flux", "run", *sizes, *_program(request)]


KUBERNETES = Scheduler(
    launchers=("mpirun",),
    directives=lambda request: [],
    again=lambda request: [f"exit {AGAIN}"],
    hostfile="/etc/mpi/hostfile",
    unsaid=lambda request: {
        "account": "there is none",
        "modules": "put what they bring into the image",
        "queue": "add the labels of the site's queues",
    },
)

_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_KUBERNETES_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
# keep_fqdn_hostnames: hosts in Kubernetes have qualified names, which Open MPI 4 would truncate.
_MANIFEST = """\
apiVersion: kubeflow.org/v2beta1
kind: MPIJob
metadata:
  name: {name}
spec:
  slotsPerWorker: {ranks_per_node}
  launcherCreationPolicy: WaitForWorkersReady
  runPolicy:
    cleanPodPolicy: Running
    backoffLimit: 100  # each start of the launcher after a time limit counts
  mpiReplicaSpecs:
    Launcher:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: launcher
              image: "{image}"
              env:
                - {{name: OMPI_MCA_orte_keep_fqdn_hostnames, value: "true"}}
                - {{name: PRTE_MCA_prte_keep_fqdn_hostnames, value: "true"}}
              command: [/bin/bash, -c]
              args:
                - |
{body}
              volumeMounts:
                - {{name: runs, mountPath: /runs}}
          volumes:
            - name: runs
              persistentVolumeClaim: {{claimName: runs}}
    Worker:
      replicas: {nodes}
      template:
        spec:
          containers:
            - name: worker
              image: "{image}"
              resources:
                limits: {limits}
              volumeMounts:
                - {{name: runs, mountPath: /runs}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - name: runs
              persistentVolumeClaim: {{claimName: runs}}
            - name: shm
              emptyDir: {{medium: Memory}}
"""


def mpi_job(request: JobRequest) -> str:
    """Return the manifest in YAML."""
    if not _KUBERNETES_NAME.fullmatch(request.name):
        raise UsageError(
            f"--name {request.name!r}: for k8s use up to 52 lower-case letters, digits and '-'"
        )
    if not _IMAGE.fullmatch(request.image):
        raise UsageError(f"--image {request.image!r} is not the name of an image")
    lines = body(replace(request, modules=()), KUBERNETES).splitlines()
    gpus = f", nvidia.com/gpu: {request.gpus_per_node}" if request.gpus_per_node else ""
    return _MANIFEST.format(
        name=request.name,
        nodes=request.nodes,
        ranks_per_node=request.ranks_per_node,
        image=request.image,
        limits=f"{{cpu: {request.cpus_per_node}{gpus}}}",
        body="\n".join(" " * 18 + line if line else "" for line in lines),
    )
