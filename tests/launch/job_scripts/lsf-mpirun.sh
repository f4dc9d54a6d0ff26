#!/bin/bash
#BSUB -J "hvdtrain"
#BSUB -W 4:00
#BSUB -n 8
#BSUB -R "span[ptile=4]"
#BSUB -gpu "num=4"
#BSUB -o hvdtrain-%J.out
#BSUB -Q 75

# Modules and variables of this site belong here.
ulimit -c 0
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  python -m hvdtrain run -np 8 -x OUT -- script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 75
fi
exit "$code"
