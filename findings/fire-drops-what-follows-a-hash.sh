#!/usr/bin/env bash
# Fire 0.7.1: arguments end at the character "#".
#
# Seen with fire 0.7.1, Python 3.11: Fire parses arguments as Python, in which "#" starts a comment. `--name run#1` and
# `--name run#2` both arrive as "run", `--data set#3.csv` as "set", and `--steps 10#0` as 10, whatever quotes the shell
# was given, so that runs write over each other's results. With a character in front that Python does not take, as "/"
# or "-", the argument is whole: ./set#3.csv, run-1#2. The documentation has no word on it. Only a second pair of quotes
# inside keeps it. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet fire==0.7.1
cat >"$folder/script.py" <<'PYTHON'
import fire


def show(name):
    return repr(name)


fire.Fire(show)
PYTHON
check() {
    seen=$("$folder/venv/bin/python" "$folder/script.py" --name "$1")
    echo "--name $1 is $seen"
    [ "$seen" = "$2" ] || { echo "changed: $1"; exit 1; }
}
check "run#1" "'run'"
check "run#2" "'run'"
check "set#3.csv" "'set'"
check "10#0" "10"
check "./set#3.csv" "'./set#3.csv'"
check "run-1#2" "'run-1#2'"
check "'run#1'" "'run#1'"
