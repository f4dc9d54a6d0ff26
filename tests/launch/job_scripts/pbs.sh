#!/bin/bash
#PBS -N digits
#PBS -A lab1
#PBS -q short
#PBS -l select=2:ncpus=6:mpiprocs=3:ngpus=6
#PBS -l place=scatter
#PBS -l walltime=26:30:00
#PBS -j oe
#PBS -r y
#PBS -J 0-3

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
cd "$PBS_O_WORKDIR" || exit
export OMP_NUM_THREADS=2
export OUT=runs/digits"-$PBS_ARRAY_INDEX"
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 95310 \
  '/opt/py 3/python' -m hvdtrain run -np 6 -- script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  echo "$OUT is not done: submit this job of the array again" >&2
fi
exit "$code"
