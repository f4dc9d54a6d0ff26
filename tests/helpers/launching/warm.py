"""Ranks that need not import their framework: a warm process has, and forks them.

launch(warm="torch") has the launcher start warm_rank.py in place of each rank. It hands its
streams, environment, directory and arguments to warm_server.py, which has imported torch, once for
all tests of a session, and has neither threads nor an MPI. It is for tables of cases: processes,
signals, imports, and what Python reads at its start are tested with ranks of the launcher's own.
"""

import atexit
import functools
import os
import socket
import subprocess
import uuid
from pathlib import Path

_FOLDER = Path(__file__).parent
# For the environment of a rank, which /proc shall show in place of that of the warm process.
_ROOM_BYTES = 1 << 16
_RANK, _SERVER = _FOLDER / "warm_rank.py", _FOLDER / "warm_server.py"


def warm_prefix(python: Path, modules: str) -> list[str]:
    """Return what precedes a script and its arguments on the command line of a rank.

    The first call starts the warm process, which lives as long as this one.
    """
    return [str(python), "-I", "-S", str(_RANK), _start(python, modules)[0]]


@functools.cache
def _start(python: Path, modules: str) -> tuple[str, subprocess.Popen[bytes]]:
    address = f"hvdtrain-test-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("\0" + address)
        listener.listen(64)
        number = listener.fileno()
        environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(_FOLDER / "rank_start")}
        environment |= {"ROOM": "-" * _ROOM_BYTES}
        process = subprocess.Popen(
            [python, _SERVER, str(number), *modules.split()],
            stdin=subprocess.PIPE,
            env={**os.environ, **environment},
            pass_fds=[number],
            start_new_session=True,
        )
    atexit.register(process.communicate)  # it ends with its input
    return address, process
