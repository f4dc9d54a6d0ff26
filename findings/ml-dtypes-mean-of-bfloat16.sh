#!/usr/bin/env bash
# ml_dtypes 0.6.0 with NumPy 2.4.6: the mean of 1,000 ones in bfloat16 is 0.256.
#
# Seen with ml_dtypes 0.6.0, numpy 2.4.6, jax 0.10.2 (CPU), Python 3.11: sum() adds in bfloat16 one by one, and stops
# at 256, since 256 + 1 is 256 there; mean() divides that by 1,000, cumsum() ends at 256, and var() of ones
# is not 0. With NumPy's own float16, mean() takes float32 between, and sum() gives 1000. JAX's sum() of the
# same array is right, and so is NumPy's with dtype=float32. So a loss or a gradient in bfloat16 that is
# averaged after numpy.asarray() is too small, without a warning.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet ml_dtypes==0.6.0 numpy==2.4.6 jax==0.10.2
"$folder/venv/bin/python" - <<'PYTHON'
import jax.numpy as jnp
import ml_dtypes
import numpy as np

assert ml_dtypes.__version__ == "0.6.0" and np.__version__ == "2.4.6", (ml_dtypes.__version__, np.__version__)
of_jax = jnp.ones(1000, jnp.bfloat16)
ones, half = np.asarray(of_jax), np.ones(1000, np.float16)
assert ones.dtype == ml_dtypes.bfloat16
found = [float(value) for value in (ones.sum(), ones.mean(), ones.cumsum()[-1], ones.var())]
right = [float(value) for value in (of_jax.sum(), ones.sum(dtype=np.float32), half.sum(), half.mean())]
print(f"bfloat16 in NumPy: sum, mean, last of cumsum, variance {found}")
print(f"JAX's sum, NumPy's in float32, float16's sum and mean {right}")
assert found[:3] == [256.0, 0.255859375, 256.0] and found[3] > 0.1, "changed: bfloat16"
assert right == [1000.0, 1000.0, 1000.0, 1.0], "changed: what is right"
PYTHON
