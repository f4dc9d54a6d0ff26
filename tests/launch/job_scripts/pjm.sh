#!/bin/bash
#PJM -N digits
#PJM -g lab1
#PJM -L rscgrp=short
#PJM -L node=2
#PJM -L elapse=26:30:00
#PJM --mpi proc=6
#PJM -j
#PJM -S

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMPI_MCA_plm_rsh_agent=/bin/pjrsh PRTE_MCA_plm_ssh_agent=/bin/pjrsh
hosts=hosts-"$PJM_JOBID"
'/opt/py 3/python' -m hvdtrain hosts --from pjm --slots 3 > "$hosts"
export OMP_NUM_THREADS=2
export OUT=runs/digits
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 95310 \
  '/opt/py 3/python' -m hvdtrain run -np 6 -x OUT -hostfile "$hosts" -- script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  pjsub again.sh
fi
exit "$code"
