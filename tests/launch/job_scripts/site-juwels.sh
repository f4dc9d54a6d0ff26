#!/bin/bash
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --partition=booster
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For juwels, by copies of these pages, read on 2026-11-30:
#   https://apps.fz-juelich.de/jsc/hps/juwels/affinity.html
#   https://github.com/FZJ-JSC/tutorial-multi-gpu/blob/f2af29431d662f342b2a8ca4e0a3238223509ed9/.etc/jsccourse-bashrc.sh
#   https://github.com/FZJ-JSC/tutorial-multi-gpu/blob/f2af29431d662f342b2a8ca4e0a3238223509ed9/.etc/modules.sh
#   https://co-design.pop-coe.eu/experiments/gpu-affinity/juwels-booster.html
# The Booster. Its Slurm binds local rank N to cores beside GPU N by itself.
# The modules are those of JSC's course at SC25.
# Unproven: nobody has run this there yet.
module load GCC/13.3.0
module load CUDA/12
module load OpenMPI/5.0.5
module load NCCL/default-CUDA-12
module load MPI-settings/CUDA
ulimit -c 0
export OMP_NUM_THREADS=12
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=12 --gpu-bind=none python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
