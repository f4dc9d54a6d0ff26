#!/bin/bash
# Stands in for ssh: `agent.sh [OPTIONS] HOST COMMAND...` runs COMMAND on this machine as if on
# HOST. It gives it a host name and processes of its own, and like ssh it passes nothing of the
# environment on, but for the two variables by which the tests find their processes and results.
# A file HOST.down in TMPDIR stands for a host that does not answer.
while [[ $1 == -* ]]; do shift; done
host=$1
shift
as=()
if [[ -e "${TMPDIR:-/tmp}/$host.down" ]]; then
  echo "ssh: connect to host $host port 22: No route to host" >&2
  exit 255
fi
# Open MPI names files by process numbers: those of every stand-in host begin at 1.
temporary=$(mktemp -d "${TMPDIR:-/tmp}/$host.XXXXXX")
environment=(
  HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin
  HVDTRAIN_TEST_JOB="$HVDTRAIN_TEST_JOB" HVDTRAIN_TEST_RESULTS="$HVDTRAIN_TEST_RESULTS"
  TMPDIR="$temporary"
)
if ((EUID != 0)); then
  as=(--user --map-root-user) # only a namespace's root may name the host
  environment+=(PRTE_ALLOW_RUN_AS_ROOT=1 PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1)
fi
exec env -i "${environment[@]}" \
  unshare "${as[@]}" --uts --pid --fork --kill-child --mount-proc bash -c "hostname $host; $*"
