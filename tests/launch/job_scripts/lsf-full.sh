#!/bin/bash
#BSUB -J "digits[1-4]"
#BSUB -P lab1
#BSUB -q short
#BSUB -W 26:30
#BSUB -nnodes 2
#BSUB -o digits-%J-%I.out
#BSUB -Q 75

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMP_NUM_THREADS=2
export OUT=runs/digits"-$LSB_JOBINDEX"
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 95310 \
  jsrun -n 6 -r 3 -a 1 -g 0 -c 2 -b rs -d packed '/opt/py 3/python' -m hvdtrain script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 75
fi
exit "$code"
