#!/usr/bin/env bash
# Lightning 2.6.6, JAX 0.10.2 and TensorFlow 2.21.0 read some node lists of Slurm wrongly, each in its own way.
#
# Seen with lightning 2.6.6, jax 0.10.2, tensorflow-cpu 2.21.0, python-hostlist 2.3.0, Python 3.11: Slurm writes
# the nodes rack1n3, rack1n4, rack2n3 and rack2n4 as rack[1-2]n[3-4]. Lightning and JAX, which need the first one as
# the address where all ranks meet, take rack1. Of n[1-2]-ib JAX takes n1, which may exist and be another
# interface; Lightning is right. TensorFlow's SlurmClusterResolver refuses both with ValueError.
# python-hostlist expands them. Ranks then wait for a host that does not exist, or for a wrong one.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet lightning==2.6.6 torch==2.13.0 jax==0.10.2 tensorflow-cpu==2.21.0 \
    python-hostlist==2.3.0 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import os

import hostlist
from jax._src.clusters.slurm_cluster import SlurmCluster
from lightning.fabric.plugins.environments import SLURMEnvironment
from tensorflow.python.distribute.cluster_resolver.slurm_cluster_resolver import expand_hostlist


def by_jax(nodes):
    os.environ.update(SLURM_JOB_ID="1", SLURM_STEP_NODELIST=nodes)
    return SlurmCluster.get_coordinator_address(10, "1234").removesuffix(":1234")


def by_tensorflow(nodes):
    try:
        return expand_hostlist(nodes)[0]
    except ValueError:
        return "ValueError"


for nodes, right, lightning, jax, tensorflow in (
    ("n[08-10]", "n08", "n08", "n08", "n08"),
    ("head,n[1-2]", "head", "head", "head", "head"),
    ("rack[1-2]n[3-4]", "rack1n3", "rack1", "rack1", "ValueError"),
    ("n[1-2]-ib", "n1-ib", "n1-ib", "n1", "ValueError"),
):
    first = hostlist.expand_hostlist(nodes)[0]
    seen = SLURMEnvironment.resolve_root_node_address(nodes), by_jax(nodes), by_tensorflow(nodes)
    print(f"{nodes}: first host {first}; Lightning, JAX and TensorFlow take {', '.join(seen)}")
    assert first == right, "python-hostlist"
    assert seen == (lightning, jax, tensorflow), f"changed: {nodes}"
PYTHON
TF_CPP_MIN_LOG_LEVEL=3 "$folder/venv/bin/python" -W ignore "$folder/script.py"
