"""A rank that runs programs as they come: program_rank.py SOCKET."""

import faulthandler
import gc
import json
import os
import socket
import sys

from job import rank_of
from torch_programs import run


def serve(address: str) -> None:
    """Run each program that the driver sends, a line each, and answer with how it ended."""
    rank = rank_of(os.environ) or 0
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        stream = connection.makefile("rw")
        print(json.dumps(rank), file=stream, flush=True)
        gc.freeze()
        for line in stream:
            faulthandler.dump_traceback_later(100)  # before the test gives up
            program, size = json.loads(line)
            print(json.dumps(run(program, rank, size)), file=stream, flush=True)
            gc.collect()


serve(*sys.argv[1:])
