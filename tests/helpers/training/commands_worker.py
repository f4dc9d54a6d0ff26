"""Runs a JSON list of commands of hvdtrain in one world; reports their codes and output."""

import contextlib
import io
import json
import sys
import traceback
from typing import Any

from ranks import report

from hvdtrain.cli.main import main


def run(words: list[str]) -> dict[str, Any]:
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(words)
        except SystemExit as leaving:
            code = leaving.code
        except Exception:
            code = "raised"
            traceback.print_exc()
    return {"code": code, "out": out.getvalue(), "err": err.getvalue()}


commands = json.loads(sys.argv[1])
report(len(commands), [run(words) for words in commands])
