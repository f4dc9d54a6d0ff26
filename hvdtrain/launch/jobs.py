"""Job scripts for schedulers and Kubernetes: directives, the launch, and how a job starts again."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import EXIT_REQUEUE, UsageError
from hvdtrain.launch.launchers.choice import SLURM_FENCES
from hvdtrain.launch.sites import Site

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_TIME = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?")
_ARRAY = re.compile(r"(\d+)-(\d+)")
_UNITS = (86400, 3600, 60, 1)


def _require_sense(asked: Mapping[str, Any]) -> None:
    for name in ("name", "script", "account", "queue", "mpi"):
        word = asked[name]
        if (word or name in ("name", "script")) and not _NAME.fullmatch(word):
            raise UsageError(f"--{name} {word!r}: write letters, digits, '.', '_' and '-'")
    for name in ("nodes", "cpus_per_rank"):
        if asked[name] < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, got {asked[name]}")
    ranks, gpus = asked["ranks_per_node"], asked["gpus_per_node"]
    if ranks < 1:
        raise UsageError("how many ranks on each node? Pass --gpus-per-node or --ranks-per-node")
    if gpus % ranks:
        raise UsageError(
            f"{gpus} GPUs cannot be divided among {ranks} ranks: give a rank one GPU, or the same "
            "number to each"
        )
    if asked["seconds"] < 1:
        raise UsageError("--time must be positive")
    if not 0 < asked["notice_seconds"] < asked["seconds"]:
        raise UsageError("--notice must be positive and shorter than --time")
    if asked["mpi"] and asked["launcher"] != "srun":
        raise UsageError(f"--mpi {asked['mpi']} goes with --launcher srun only")
    if asked["stage_env"] and asked["launcher"] != "mpirun":
        raise UsageError("--stage-env goes with --launcher mpirun only")
    array = _ARRAY.fullmatch(asked["array"])
    if asked["array"] and (array is None or int(array[1]) > int(array[2])):
        raise UsageError(f"--array {asked['array']!r}: write it as 1-4")


def parse_seconds(text: str, option: str) -> int:
    """Return the seconds of "4h", "1h30m", "90m" or "1d"."""
    match = _TIME.fullmatch(text)
    if not text or match is None:
        raise UsageError(f"{option} {text!r}: write it as 4h, 90m, 1h30m or 1d")
    return sum(int(count or 0) * unit for count, unit in zip(match.groups(), _UNITS, strict=True))


class _Word(str):
    """A value in a template: {name:text} is the text, if there is a value, which replaces a *."""

    def __format__(self, text: str) -> str:
        return text.replace("*", self) if self and text else str(self)


def _filled(template: str, values: Mapping[str, object]) -> str:
    """Fill a template, without the lines in which a {name} is empty or 0."""
    words = {name: _Word(value or "") for name, value in values.items()}
    absent = [f"{{{name}}}" for name, word in words.items() if not word]
    lines = [line for line in template.splitlines() if not any(name in line for name in absent)]
    return "\n".join(lines).format_map(words)


_AGAIN = 99  # the exit code that means "start it again" to Grid Engine and OAR

_SLURM = """\
#SBATCH --job-name={name}
#SBATCH --account={account}
#SBATCH --partition={queue}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node={ranks_per_node}
#SBATCH --gpus-per-node={gpus_per_node}
#SBATCH --cpus-per-task={cpus_per_rank}
#SBATCH --time={clock}
#SBATCH --signal=B:USR1@{notice_seconds}
#SBATCH --open-mode=append
#SBATCH --output=%x-{alone:%j}{array:%A-%a}.out
#SBATCH --array={array}
#SBATCH --requeue
"""
_PBS = """\
#PBS -N {name}
#PBS -A {account}
#PBS -q {queue}
#PBS -l select={nodes}:ncpus={cpus_per_node}:mpiprocs={ranks_per_node}{gpus_per_node::ngpus=*}
#PBS -l place=scatter
#PBS -l walltime={clock}
#PBS -j oe
#PBS -r y
#PBS -J {array}
"""
_LSF = f"""\
#BSUB -J "{{name}}{{array:[*]}}"
#BSUB -P {{account}}
#BSUB -q {{queue}}
#BSUB -W {{hours}}:{{minutes_of_hour}}
#BSUB -nnodes {{jsrun_nodes}}
#BSUB -n {{mpirun_ranks}}
#BSUB -R "span[ptile={{mpirun_ranks_per_node}}]"
#BSUB -gpu "num={{mpirun_gpus_per_node}}"
#BSUB -o {{name}}-%J{{array:-%I}}.out
#BSUB -Q {EXIT_REQUEUE}
"""
# Many queues ignore the first line of a script, and run it with sh or csh.
_SGE = """\
#$ -S /bin/bash
#$ -N {name}
#$ -P {account}
#$ -q {queue}
#$ -pe mpi {ranks}
#$ -l h_rt={clock}
#$ -cwd
#$ -j y
#$ -r y
#$ -t {array}
"""
_PJM = """\
#PJM -N {name}
#PJM -g {account}
#PJM -L rscgrp={queue}
#PJM -L node={nodes}
#PJM -L elapse={clock}
#PJM --mpi proc={ranks}
#PJM -j
#PJM -S
"""
_PJM_SETUP = """\
export OMPI_MCA_plm_rsh_agent=/bin/pjrsh PRTE_MCA_plm_ssh_agent=/bin/pjrsh
hosts=hosts-"$PJM_JOBID"
{python} -m hvdtrain hosts --from pjm --slots {ranks_per_node} > "$hosts"
"""
_FLUX = """\
# flux: --job-name={name}
# flux: --bank={account}
# flux: --queue={queue}
# flux: -N{nodes}
# flux: --exclusive
# flux: -t {minutes}m
# flux: --signal=USR1@{notice_seconds}s
# flux: --output={name}-{{{{id}}}}.out
"""
# OAR starts a job again that ends with 99 after a minute or more. Its own signal (--checkpoint)
# goes to the shell that it starts the script with, which dies of it.
_OAR = """\
#OAR -n {name}
#OAR --project {account}
#OAR -q {queue}
#OAR -l nodes={nodes},walltime={clock}
#OAR -t idempotent
#OAR -O {name}-%jobid%.out
#OAR -E {name}-%jobid%.out
"""
_SUBMIT = """\
# The name under which this script was saved, in the directory of the job.
{command} {{script}}
"""

_WORDS = '{arguments}{trains: --out "$OUT" --resume auto}'
_PROGRAM = "{python} -m hvdtrain " + _WORDS
_LAUNCHES = {
    # `hvdtrain run` finds the mpirun of the loaded MPI, and builds its command line. A user's
    # script writes its requeue marker in $OUT.
    "mpirun": "{python} -m hvdtrain run{stage_env: --stage-env *} -np {ranks}"
    "{per_node: --per-node *}{sent: -x *}{hostfile: -hostfile *} -- " + _WORDS,
    # A rank that fails must end all.
    "srun": "srun{mpi: --mpi=*} --kill-on-bad-exit=1 --cpus-per-task={cpus_per_rank}"
    "{placement: *} " + _PROGRAM,
    "jsrun": "jsrun -n {ranks} -r {ranks_per_node} -a 1 -g {gpus_per_rank:*}{no_gpus:0} "
    "-c {cpus_per_rank} -b rs -d packed " + _PROGRAM,
    "flux": "flux run -N{nodes} -n{ranks} -c{cpus_per_rank}"
    "{gpus_per_rank: -g* -o gpu-affinity=per-task} " + _PROGRAM,
    # Of PALS, or of Fujitsu, whose directives have the number of ranks on a node.
    "mpiexec": "mpiexec -n {ranks}{pals_ranks_per_node: --ppn *}{placement: *} " + _PROGRAM,
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
timeout --preserve-status --signal=USR1 {unwarned_seconds} \\
  {launch}
code=$?
"""
_SCRIPT = """\
#!/bin/bash{login: -l}
{directives}

{body}
"""
_BODY = """\
{heading}
{loads}
{exports}
ulimit -c 0
{setup}
export OMP_NUM_THREADS={cpus_per_rank}
export {fences}  # of PMIx: with others, Open MPI may crash at the start
export OUT={out}{index:"-$*"}
rm -f "$OUT/requeue"

{start}

if [[ -e $OUT/requeue ]]; then
{again}
fi
exit "$code"
"""
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
                limits: {{cpu: {cpus_per_node}{gpus_per_node:, nvidia.com/gpu: *}}}
              volumeMounts:
                - {{name: runs, mountPath: /runs}}
                - {{name: shm, mountPath: /dev/shm}}
          volumes:
            - name: runs
              persistentVolumeClaim: {{claimName: runs}}
            - name: shm
              emptyDir: {{medium: Memory}}
"""


_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_KUBERNETES_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class Scheduler:
    """How to write scripts for a scheduler, mostly in templates."""

    launchers: Sequence[str]
    directives: str
    again: str
    again_in_array: str = ""
    array: str = ""  # variable with the number of a job, from `first` on
    first: int = 0
    form: str = _TIMED
    setup: str = ""
    hostfile: str = ""
    known: bool = True  # to mpirun, which starts ranks by it, and with all variables
    per_node: bool = False  # the hosts' slots are cores, and not ranks
    # Options that a script whose ranks mpirun starts cannot express, and what to do instead.
    unsaid: Mapping[str, str] = field(default_factory=dict)


SCHEDULERS: Mapping[str, Scheduler] = {
    "slurm": Scheduler(
        ("srun", "mpirun"),
        _SLURM,
        'scontrol requeue "$SLURM_JOB_ID"',
        'scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"',
        array="SLURM_ARRAY_TASK_ID",
        form=_PASSED_ON,
    ),
    "pbs": Scheduler(
        ("mpirun", "mpiexec"),
        _PBS,
        _SUBMIT.format(command="qsub"),
        'echo "$OUT is not done: submit this job of the array again" >&2',
        array="PBS_ARRAY_INDEX",
        setup='cd "$PBS_O_WORKDIR" || exit',
    ),
    "lsf": Scheduler(
        ("jsrun", "mpirun"),
        _LSF,
        f"exit {EXIT_REQUEUE}",
        array="LSB_JOBINDEX",
        first=1,
        known=False,
        unsaid={"cpus_per_rank": "a rank has one slot, of as many cores as the site says"},
    ),
    "sge": Scheduler(
        ("mpirun",),
        _SGE,
        f"exit {_AGAIN}",
        array="SGE_TASK_ID",
        first=1,
        known=False,
        unsaid={
            "nodes": "in '-pe mpi' name an environment of the site that puts as many ranks on a "
            "host",
            "gpus_per_node": "add the site's line for them, such as '#$ -l gpu=4'",
            "cpus_per_rank": "in '-pe mpi' name an environment of the site that gives a rank its "
            "cores",
        },
    ),
    "pjm": Scheduler(
        ("mpirun", "mpiexec"),
        _PJM,
        _SUBMIT.format(command="pjsub"),
        setup=_PJM_SETUP,
        hostfile='"$hosts"',
        known=False,
        unsaid={
            "gpus_per_node": "name a resource group with as many in --queue",
            "cpus_per_rank": "ranks share the cores of a node",
        },
    ),
    "flux": Scheduler(
        ("flux", "mpirun"),
        _FLUX,
        _SUBMIT.format(command="flux batch"),
        form=_WARNED,
        known=False,
    ),
    "oar": Scheduler(
        ("mpirun",),
        _OAR,
        f"exit {_AGAIN}",
        setup="export OMPI_MCA_plm_rsh_agent=oarsh PRTE_MCA_plm_ssh_agent=oarsh "
        "HYDRA_LAUNCHER_EXEC=oarsh",
        known=False,
        per_node=True,
        unsaid={
            "gpus_per_node": "add the site's resource to '-l', such as nodes=2/gpu=4",
            "cpus_per_rank": "ranks share the cores of whole nodes",
        },
    ),
    "k8s": Scheduler(
        ("mpirun",),
        "",
        f"exit {EXIT_REQUEUE}",
        hostfile="/etc/mpi/hostfile",
        known=False,
        unsaid={
            "account": "there is none",
            "modules": "put what they bring into the image",
            "queue": "add the labels of the site's queues",
        },
    ),
}


def job_script(name: str, asked: Mapping[str, Any], site: Site | None = None) -> str:
    """Return the script for a scheduler, or the manifest in YAML for Kubernetes.

    `asked` has the options of `hvdtrain job` by name; times are in seconds.
    """
    scheduler, pods = SCHEDULERS[name], name == "k8s"
    _require_sense(asked)
    if pods:
        if not _KUBERNETES_NAME.fullmatch(asked["name"]):
            raise UsageError(
                f"--name {asked['name']!r}: for k8s use up to 52 lower-case letters, digits and '-'"
            )
        if not _IMAGE.fullmatch(asked["image"]):
            raise UsageError(f"--image {asked['image']!r} is not the name of an image")
    values = _values(asked, scheduler, [] if pods else asked["modules"])
    values["pals_ranks_per_node"] = name == "pbs" and asked["ranks_per_node"]
    directives = scheduler.directives
    if site is not None:
        directives = site.replace_directives(directives)
        values |= {"heading": site.heading(asked["site"]), "login": site.login}
        values["exports"] = site.exports()
        values["placement"] = site.placement_of(asked["ranks_per_node"]) or values["placement"]
    again = scheduler.again_in_array if asked["array"] else ""
    values["launch"] = _filled(_LAUNCHES[asked["launcher"]], values)
    values["start"] = _filled(scheduler.form, values)
    # A hostfile is for mpirun.
    unused = asked["launcher"] == "mpiexec" and scheduler.hostfile
    values["setup"] = "" if unused else _filled(scheduler.setup, values)
    values["again"] = textwrap.indent(_filled(again or scheduler.again, values), "  ")
    values["directives"] = _filled(directives, values)
    body = _filled(_BODY, values)
    values["body"] = textwrap.indent(body, " " * 18) if pods else body
    return _filled(_MANIFEST if pods else _SCRIPT, values) + "\n"


def _values(
    asked: Mapping[str, Any], scheduler: Scheduler, modules: Sequence[str]
) -> dict[str, Any]:
    """Return what stands in templates, by name."""
    own, seconds, each = asked["launcher"] == "mpirun", asked["seconds"], asked["ranks_per_node"]
    minutes, ranks = -(-seconds // 60), asked["nodes"] * each
    return {
        **asked,
        "python": shlex.quote(asked["python"]),
        "arguments": shlex.join(asked["arguments"]),
        "stage_env": asked["stage_env"] and shlex.quote(asked["stage_env"]),
        "out": shlex.quote(asked["out"]),
        "heading": "# Modules and variables of this site belong here.",
        "exports": "",
        "login": "",
        # Every rank sees all GPUs of its node: hidden from each other, they have no peer access.
        "placement": asked["launcher"] == "srun" and asked["gpus_per_node"] and "--gpu-bind=none",
        "fences": asked["launcher"] == "srun"
        and asked["mpi"][:4] in ("", "pmix")
        and "{0}=${{{0}:-{1}}}".format(*SLURM_FENCES),
        "loads": "\n".join(f"module load {shlex.quote(module)}" for module in modules),
        "ranks": ranks,
        "cpus_per_node": each * asked["cpus_per_rank"],
        "gpus_per_rank": asked["gpus_per_node"] // each,
        "no_gpus": not asked["gpus_per_node"],
        "jsrun_nodes": not own and asked["nodes"],
        "mpirun_ranks": own and ranks,
        "mpirun_ranks_per_node": own and each,
        "mpirun_gpus_per_node": own and asked["gpus_per_node"],
        "alone": not asked["array"],
        "index": asked["array"] and scheduler.array,
        "clock": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
        "minutes": minutes,
        "hours": str(minutes // 60),
        "minutes_of_hour": f"{minutes % 60:02}",
        "unwarned_seconds": seconds - asked["notice_seconds"],
        "hostfile": scheduler.hostfile,
        "per_node": scheduler.per_node and each,
        "sent": not scheduler.known and not asked["trains"] and "OUT",
    }
