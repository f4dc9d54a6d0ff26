#!/bin/bash
# flux: --job-name=digits
# flux: --bank=lab1
# flux: --queue=short
# flux: -N2
# flux: --exclusive
# flux: -t 1590m
# flux: --signal=USR1@90s
# flux: --output=digits-{{id}}.out

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMP_NUM_THREADS=2
export OUT=results/here
rm -f "$OUT/requeue"

trap : USR1
'/opt/py 3/python' -m hvdtrain run -np 6 -- train --epochs 3 --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  flux batch digits.sh
fi
exit "$code"
