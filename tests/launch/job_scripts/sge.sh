#!/bin/bash
#$ -S /bin/bash
#$ -N hvdtrain
#$ -pe mpi 8
#$ -l h_rt=04:00:00
#$ -cwd
#$ -j y
#$ -r y

# Modules and variables of this site belong here.
ulimit -c 0
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  python -m hvdtrain run -np 8 -- train digits --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 99
fi
exit "$code"
