#!/bin/bash -l
#SBATCH --job-name=hvdtrain
#SBATCH --account=lab1
#SBATCH --partition=standard-g
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --mem-per-gpu=60G
#SBATCH --cpus-per-task=7
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out
#SBATCH --requeue

# For lumi, by copies of these pages, read on 2026-11-30:
#   https://github.com/Lumi-supercomputer/lumi-userguide/blob/bad69acc5cf20dd23d3b596a54b4c68bb752001f/docs/runjobs/scheduled-jobs/lumig-job.md
#   https://github.com/Lumi-supercomputer/LUMI-AI-Guide/blob/2d24917706048b26ef905fa7e0646efe93d70996/05-multi-gpu-and-node/run_ddp_srun_4.sh
# The masks bind local rank N to seven cores beside GPU N; they need whole nodes.
# Unproven: nobody has run this there yet.
ulimit -c 0
export OMP_NUM_THREADS=7
export SLURM_PMIX_FENCE=${SLURM_PMIX_FENCE:-ring}  # of PMIx: with others, Open MPI may crash at the start
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --kill-on-bad-exit=1 --cpus-per-task=7 --gpu-bind=none --cpu-bind=mask_cpu:0xfe000000000000,0xfe00000000000000,0xfe0000,0xfe000000,0xfe,0xfe00,0xfe00000000,0xfe0000000000 python -m hvdtrain script train.py --lr 0.1 'it'"'"'s' &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
