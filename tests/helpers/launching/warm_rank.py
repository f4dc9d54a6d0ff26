"""What a launcher starts in place of a rank that a warm process forks: see warm.py.

warm_rank.py ADDRESS SCRIPT ARGUMENTS...: it ends as the rank does, and the rank ends when it does.
"""

import json
import os
import signal
import socket
import sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
    connection.connect("\0" + sys.argv[1])
    request = {"arguments": sys.argv[2:], "directory": os.getcwd(), "environment": dict(os.environ)}
    socket.send_fds(connection, [json.dumps(request).encode()], [0, 1, 2])
    for number in range(3):
        os.close(number)
    answer = connection.recv(16)
code = int(answer or -signal.SIGKILL)
if code < 0:
    signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
    os.kill(os.getpid(), -code)
sys.exit(code)
