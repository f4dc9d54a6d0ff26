"""Job scripts: directives, the launch, and how the job is started again."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs.schedulers import AGAIN, SCHEDULERS, JobRequest, Scheduler

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
    words = {"mpirun": _mpirun, "srun": _srun, "jsrun": _jsrun, "flux": _flux}[request.launcher]
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


def _flux(request: JobRequest) -> list[str]:
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
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
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
    if not _NAME.fullmatch(request.name):
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
