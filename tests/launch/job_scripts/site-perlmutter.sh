#!/bin/bash
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For perlmutter, by copies of these pages, read on 2026-11-30:
#   https://github.com/NERSC/sc25-dl-tutorial/blob/c690fe809875d913d9ef810fbc23783437191c75/submit_pm_dp.sh
#   https://docs.nersc.gov/jobs/policy/
# Cores are counted as hardware threads. GPUs are in the order of Slurm's bindings to cores.
# Unproven: nobody has run this there yet.
export CUDA_VISIBLE_DEVICES=3,2,1,0
export FI_MR_CACHE_MONITOR=userfaultfd
ulimit -c 0
export OMP_NUM_THREADS=32
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=32 --gpu-bind=none python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
