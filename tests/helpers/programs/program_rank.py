"""A rank that runs programs as they come: program_rank.py MODULE SOCKET."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import sys

from job import rank_of


def serve(module: str, address: str) -> None:
    """Run each program that the driver sends, a line each, and answer with how it ended."""
    rank = rank_of(os.environ) or 0
    with socket.socket(socket.AF_UNIX) as connection, open(f"{address}.{rank}", "w") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        connection.connect(address)
        stream = connection.makefile("rw")
        run = importlib.import_module(module).run
        print(json.dumps([rank, os.getpid()]), file=stream, flush=True)
        gc.freeze()
        for line in stream:
            program, size = json.loads(line)
            print(json.dumps(run(program, rank, size)), file=stream, flush=True)
            gc.collect()


serve(*sys.argv[1:])
