#!/bin/bash
#OAR -n digits
#OAR --project lab1
#OAR -q short
#OAR -l nodes=2,walltime=26:30:00
#OAR -t idempotent
#OAR -O digits-%jobid%.out
#OAR -E digits-%jobid%.out

# Modules and variables of this site belong here.
module load cuda/12
module load 'my env'
ulimit -c 0
export OMPI_MCA_plm_rsh_agent=oarsh PRTE_MCA_plm_ssh_agent=oarsh HYDRA_LAUNCHER_EXEC=oarsh
export OMP_NUM_THREADS=2
export OUT=runs/digits
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 95310 \
  '/opt/py 3/python' -m hvdtrain run --stage-env '/scratch/my archives' -np 6 --per-node 3 -x OUT -- script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  exit 99
fi
exit "$code"
