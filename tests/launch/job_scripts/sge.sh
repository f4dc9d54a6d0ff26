#!/bin/bash
#$ -S /bin/bash
#$ -N digits
#$ -P lab1
#$ -q short
#$ -pe mpi 6
#$ -l h_rt=26:30:00
#$ -cwd
#$ -j y
#$ -r y
#$ -t 1-4

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMP_NUM_THREADS=2
export OUT=results/here"-$SGE_TASK_ID"
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 95310 \
  '/opt/py 3/python' -m hvdtrain run -np 6 -- train --epochs 3 --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 99
fi
exit "$code"
