#!/bin/bash
# flux: --job-name=hvdtrain
# flux: -N2
# flux: --exclusive
# flux: -t 240m
# flux: --signal=USR1@300s
# flux: --output=hvdtrain-{{id}}.out

# Modules and variables of this site belong here.
ulimit -c 0
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

trap : USR1
flux run -N2 -n8 -c8 -g1 -o gpu-affinity=per-task python -m hvdtrain train digits --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  flux batch hvdtrain.sh
fi
exit "$code"
