#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --account=lab1
#SBATCH --partition=short
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=3
#SBATCH --cpus-per-task=2
#SBATCH --time=26:30:00
#SBATCH --signal=B:USR1@90
#SBATCH --open-mode=append
#SBATCH --output=%x-%A-%a.out
#SBATCH --array=0-3
#SBATCH --requeue

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMP_NUM_THREADS=2
export OUT=results/here"-$SLURM_ARRAY_TASK_ID"
rm -f "$OUT/requeue"

trap 'kill -USR1 "$pid"' USR1
srun --mpi=pmi2 --kill-on-bad-exit=1 --cpus-per-task=2 '/opt/py 3/python' -m hvdtrain train --epochs 3 --out "$OUT" --resume auto &
pid=$!
while kill -0 "$pid" 2> /dev/null; do wait "$pid"; done
wait "$pid"
code=$?

if [[ -e $OUT/requeue ]]; then
  scontrol requeue "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
fi
exit "$code"
