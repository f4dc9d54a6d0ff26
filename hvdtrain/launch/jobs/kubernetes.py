"""The MPIJob of Kubernetes' MPI operator (v2beta1)."""

from __future__ import annotations

import re
from dataclasses import replace

from hvdtrain.errors import UsageError
from hvdtrain.launch.jobs.schedulers import AGAIN, JobRequest, Scheduler
from hvdtrain.launch.jobs.script import body

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

# Hosts have fully qualified names there, which Open MPI 4 would truncate.
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?")
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
