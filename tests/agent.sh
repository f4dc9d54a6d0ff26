#!/bin/bash
# Stands in for ssh: `agent.sh [OPTIONS] HOST COMMAND...` runs COMMAND on this machine as if on
# HOST. It gives it a host name and processes of its own, and like ssh it passes nothing of the
# environment on, but for the two variables by which the tests find their processes and results.
while [[ $1 == -* ]]; do shift; done
host=$1
shift
user=()
((EUID == 0)) || user=(-U -r)
exec env -i HOME="$HOME" PATH=/usr/local/bin:/usr/bin:/bin \
  HVDTRAIN_TEST_JOB="$HVDTRAIN_TEST_JOB" HVDTRAIN_TEST_RESULTS="$HVDTRAIN_TEST_RESULTS" \
  unshare "${user[@]}" -u -p -f --kill-child --mount-proc bash -c "hostname $host; $*"
