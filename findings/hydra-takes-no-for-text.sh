#!/usr/bin/env bash
# hydra-core 1.3.8: `shuffle: no` in a file is False, `shuffle=no` on the command line is text, and true.
#
# Seen with hydra-core 1.3.8, omegaconf 2.3.0, Python 3.11. Files are read as YAML 1.1, in which no, off, 010, 0x10
# and 1:30 are values; the grammar of overrides knows true and false, and no other base than ten, and keeps these
# words as text without a warning. OmegaConf's own from_cli() reads them as YAML. `inf` and `nan` are the other way
# round: text in a file, numbers on the command line. A run that is repeated with its values on the command line
# trains otherwise, if the configuration has no types.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet hydra-core==1.3.8 omegaconf==2.3.0
mkdir "$folder/conf"
"$folder/venv/bin/python" -W ignore - "$folder/conf" <<'PYTHON'
import pathlib
import sys

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

folder = pathlib.Path(sys.argv[1])
with initialize_config_dir(str(folder), version_base=None):
    for word, expected in (
        ("true", (True, True, True)),
        ("1e-3", (0.001, 0.001, 0.001)),
        ("no", (False, "no", False)),
        ("off", (False, "off", False)),
        ("010", (8, "010", 8)),
        ("0x10", (16, "0x10", 16)),
        ("1:30", (90, "1:30", 90)),
        ("inf", ("inf", float("inf"), "inf")),
    ):
        (folder / "config.yaml").write_text(f"value: {word}\n")
        in_file = compose("config").value
        on_line = compose("config", [f"value={word}"]).value
        by_omegaconf = OmegaConf.from_cli([f"value={word}"]).value
        print(f"{word}: in a file {in_file!r}, on Hydra's command line {on_line!r}, on OmegaConf's {by_omegaconf!r}")
        assert (in_file, on_line, by_omegaconf) == expected, "changed"
PYTHON
