#!/bin/bash
#PJM -N hvdtrain
#PJM -L node=2
#PJM -L elapse=04:00:00
#PJM --mpi proc=8
#PJM -j
#PJM -S

# Modules and variables of this site belong here.
ulimit -c 0
export OMPI_MCA_plm_rsh_agent=/bin/pjrsh PRTE_MCA_plm_ssh_agent=/bin/pjrsh
hosts=hosts-"$PJM_JOBID"
python -m hvdtrain hosts --from pjm --slots 4 > "$hosts"
export OMP_NUM_THREADS=8
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  python -m hvdtrain run -np 8 -hostfile "$hosts" -- train digits --out "$OUT" --resume auto
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  pjsub hvdtrain.sh
fi
exit "$code"
