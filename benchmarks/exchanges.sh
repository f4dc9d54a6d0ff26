#!/bin/bash
# Measures the exchanges on slow links, and writes docs/exchanges/measured.md from the figures. As root, on
# a quiet machine, with what slow_link.sh needs:
#
#     benchmarks/exchanges.sh           # steps and losses
#     benchmarks/exchanges.sh steps     # about 14 minutes on two cores
#     benchmarks/exchanges.sh losses    # about 15 minutes
set -euo pipefail

here=$(cd "$(dirname "$0")" && pwd)
page=$here/../docs/exchanges_page.py
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
what=${1:-all}

# measure RATE NAME OPTIONS... keeps what `bench exchange` finds on a link as a record of the page.
measure() {
  RATE=$1 SLOTS=1 "$here/slow_link.sh" python -m hvdtrain bench exchange -np 2 -hostfile HOSTS \
    --out "$out/$1-$2" "${@:3}"
  python "$page" --add "$1" "$2" "$out/$1-$2/bench.json"
}

# exchanges NAME... lists options of `bench exchange`.
exchanges() { printf -- '--exchange=%s ' "$@"; }

gradients=$(exchanges half:type=bf16 nbit:bits=1 powersgd:rank=4 topk:ratio=0.01)
weights=$(exchanges local:steps=8 blockmomentum:steps=8)
# Rare enough for a slow link, and measured by steps as well as by losses.
rare=diloco:steps=112,rate=1,momentum=0.5,type=int4

# shellcheck disable=SC2086  # words of lists
if [[ $what != losses ]]; then
  measure 1gbit steps --steps 4 --repeats 8 $gradients $weights
  measure 1gbit rare --steps 4 --repeats 5 --exchange "$rare"
  measure 10gbit steps --steps 4 --repeats 8 $gradients $weights
  measure 100mbit steps --steps 1 --repeats 2 $gradients --exchange "$rare"
fi
# shellcheck disable=SC2086
if [[ $what != steps ]]; then
  weights=$(exchanges local:steps=8 postlocal:after=160,steps=8 blockmomentum:steps=8 diloco:steps=32)
  measure 1gbit text --loss text --steps 32 --repeats 5 $gradients $weights
  measure 1gbit text-decay --loss text-decay --steps 112 --repeats 5 --exchange "$rare"
  measure 1gbit digits --loss digits --steps 32 --repeats 5 $gradients $weights
  weights=$(exchanges local:steps=8 postlocal:after=40,steps=8 blockmomentum:steps=8 diloco:steps=8)
  measure 1gbit mnist-cnn --loss mnist-cnn --steps 8 --repeats 5 $gradients $weights
fi
python "$page" --write
