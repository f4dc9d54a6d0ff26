#!/usr/bin/env bash
# JAX 0.10.2: process_allgather and broadcast_one_to_all cut the 64-bit numbers of numpy arrays to 32 bits.
#
# Seen with jax 0.10.2, numpy 2.4.6, Python 3.11, 2 processes, CPU: jax.experimental.multihost_utils takes numpy
# arrays and returns numpy arrays. Of int64 only the lower 32 bits arrive: 2**40 + 7 becomes 7, and the
# sizes 2**32 of two processes are gathered as 0. float64 comes back as float32. So assert_equal fails
# on an int64 that is equal on all processes. No warning says that jax_enable_x64 is off, which
# concerns JAX's own arrays. Seeds, hashes, numbers of tokens and byte offsets are such numbers.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 numpy==2.4.6
cat >"$folder/script.py" <<'PYTHON'
import sys
import warnings

warnings.simplefilter("error")  # a warning would be an answer, too

import jax
import numpy as np
from jax.experimental import multihost_utils

assert jax.__version__ == "0.10.2", jax.__version__
jax.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]))


def report(what, array, expected, dtype):
    if jax.process_index() == 0:
        print(f"{what}: {array.tolist()}, {array.dtype}")
    assert type(array) is np.ndarray and array.dtype == dtype, f"changed: the type of {what}"
    assert array.ravel().tolist() == expected, f"changed: {what}"


seed = multihost_utils.broadcast_one_to_all(np.array([2**40 + 7]))
report("broadcast_one_to_all of the int64 2**40 + 7", seed, [7], np.int32)
sizes = multihost_utils.process_allgather(np.array([2**32]))
report("process_allgather of the int64 2**32", sizes, [0, 0], np.int32)
third = multihost_utils.process_allgather(np.array([1 / 3]))
report("process_allgather of the float64 1/3", third, [float(np.float32(1 / 3))] * 2, np.float32)
try:
    multihost_utils.assert_equal(np.array([2**40 + 7]), "seeds differ")
except AssertionError as error:
    if jax.process_index() == 0:
        print(f"assert_equal of the same int64 on both processes: AssertionError: {error}")
else:
    raise SystemExit("changed: assert_equal")
PYTHON
port=$(python3 -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/script.py" "127.0.0.1:$port" 1 &
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/script.py" "127.0.0.1:$port" 0
wait $!
