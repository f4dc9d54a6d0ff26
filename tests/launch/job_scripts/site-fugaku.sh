#!/bin/bash
#PJM -N hvdtrain
#PJM -g lab1
#PJM -L rscgrp=small
#PJM -L node=2
#PJM -L elapse=04:00:00
#PJM --mpi max-proc-per-node=4
#PJM -j
#PJM -S

# For fugaku, by copies of these pages, read on 2026-11-30:
#   https://github.com/RIKEN-RCCS/HPC-Agentic-SDK/blob/e4534b7b5c825b1677f1923badc1e3bbbb92118d/fugaku/server/fugaku_mcp/compute.py
#   https://github.com/RIKEN-RCCS/HPC-Agentic-SDK/blob/dbd4febfcd42baa2b3a790e25740990fd51d9793/fugaku/plugins/fugaku/skills/fugaku-submitting-jobs/SKILL.md
#   https://www.r-ccs.riken.jp/fugaku/docs/user-guide/sys-use/user-guide-use-1.50/build/en/UsageRules/index.html
# A job that uses a volume beside $HOME must name it: PJM -x PJM_LLIO_GFSCACHE=/vol0004
# Unproven: nobody has run this there yet.
ulimit -c 0
export OMP_NUM_THREADS=12
export OUT=runs/hvdtrain
rm -f "$OUT/requeue"

timeout --preserve-status --signal=USR1 14100 \
  mpiexec -n 8 python -m hvdtrain script train.py --lr 0.1 'it'"'"'s'
code=$?

if [[ -e $OUT/requeue ]]; then
  # The name under which this script was saved, in the directory of the job.
  pjsub hvdtrain.sh
fi
exit "$code"
