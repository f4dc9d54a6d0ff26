#!/usr/bin/env bash
# jsonargparse 4.53.0: the same number is another one in a configuration file than on the command line.
#
# Seen with jsonargparse 4.53.0, Python 3.11: `--steps 010` is 10, and `steps: 010` in a file is 8, for int, float,
# Optional[int], and Any alike; in Union[int, str] as well. What is written for a script with aligned numbers, or by one
# that counts 001 to 012, means other numbers of steps, seeds, and layers once it is moved to a file. And a
# configuration that save() writes, to run again, holds texts such as 1e3, or 12e45678 of a commit, without quotes: the
# parser that wrote it refuses it for str. In a list or dictionary of Any it writes the number 1000.0 for the text 1e3.
# LightningCLI parses and saves with it. Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jsonargparse==4.53.0
"$folder/venv/bin/python" -W error - "$folder" <<'PYTHON'
import pathlib
import sys
from importlib.metadata import version
from typing import Any, Optional, Union

from jsonargparse import ArgumentError, ArgumentParser

assert version("jsonargparse") == "4.53.0"
FOLDER = pathlib.Path(sys.argv[1])


def parser_for(kind):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=kind)
    parser.add_argument("--config", action="config")
    return parser


for kind in (int, float, Optional[int], Union[int, str], Any):
    (FOLDER / "numbers.yaml").write_text("value: 010\n")
    line = parser_for(kind).parse_args(["--value", "010"]).value
    file = parser_for(kind).parse_args(["--config", str(FOLDER / "numbers.yaml")]).value
    print(f"{kind}: 010 on the command line is {line}, in a file {file}")
    assert (line, file) == (10, 8), f"changed: {kind}"
for kind, value, again in ((str, "12e45", None), (Any, ["1e3"], [1000.0]), (Any, {"commit": "12e4"}, {"commit": 120000.0})):
    parser = parser_for(kind)
    settings = parser.parse_object({"value": value})
    parser.save(settings, FOLDER / "saved.yaml", overwrite=True)
    try:
        seen = parser.parse_path(FOLDER / "saved.yaml").value
    except ArgumentError:
        seen = None
    text = (FOLDER / "saved.yaml").read_text()
    print(f"{kind}: {settings.value!r} is saved as {text!r} and read as {'an error' if seen is None else seen}")
    assert settings.value == value and seen == again, "changed: saved"
PYTHON
