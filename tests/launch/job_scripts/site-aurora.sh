#!/bin/bash -l
#PBS -N hvdtrain
#PBS -A lab1
#PBS -q prod
#PBS -l select=2
#PBS -l filesystems=home:flare
#PBS -l place=scatter
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -r y

# For aurora, by copies of these pages, read on 2026-11-30:
#   https://github.com/argonne-lcf/user-guides/blob/0037d9fa87f77b8f6fdb6bfb9f135955dab5c653/docs/aurora/running-jobs-aurora.md
#   https://github.com/argonne-lcf/user-guides/blob/5a22036eb7872a562f2fe51d364c9b6d6dd81ad7/docs/aurora/data-science/frameworks/pytorch.md
#   https://github.com/argonne-lcf/user-guides/blob/f550acf87c29616f682ee888584bc123372f5914/docs/aurora/data-science/frameworks/oneCCL.md
# A rank for each of the 12 tiles of a node's GPUs, which are devices of the type xpu.
# Unproven: nobody has run this there yet.
module load frameworks
export FI_CXI_DEFAULT_CQ_SIZE=1048576
ulimit -c 0
cd "$PBS_O_WORKDIR" || exit
export OMP_NUM_THREADS=4
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  mpiexec -n 24 --ppn 12 --cpu-bind=list:4-7:8-11:12-15:16-19:20-23:24-27:56-59:60-63:64-67:68-71:72-75:76-79 python -m hvdtrain script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  qsub hvdtrain.sh
fi
exit "$code"
