#!/bin/bash
#PBS -N hvdtrain
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l place=scatter
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -r y

# Modules and variables of this site belong here.
ulimit -c 0
cd "$PBS_O_WORKDIR" || exit
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  python -m hvdtrain run -np 8 -- train digits --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  qsub hvdtrain.sh
fi
exit "$code"
