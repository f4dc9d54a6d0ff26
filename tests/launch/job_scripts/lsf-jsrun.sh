#!/bin/bash
#BSUB -J "hvdtrain"
#BSUB -W 4:00
#BSUB -nnodes 2
#BSUB -o hvdtrain-%J.out
#BSUB -Q 75

# Modules and variables of this site belong here.
ulimit -c 0
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  jsrun -n 8 -r 4 -a 1 -g 1 -c 8 -b rs -d packed python -m hvdtrain train digits --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 75
fi
exit "$code"
