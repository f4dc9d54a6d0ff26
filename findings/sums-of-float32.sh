#!/usr/bin/env bash
# Numba 0.68.1, Bottleneck 1.6.0 and NumExpr 2.14.2: the mean of 33,554,432 ones of float32 is 0.5.
#
# Seen with numba 0.68.1, bottleneck 1.6.0, numexpr 2.14.2, numpy 2.4.6, Python 3.11: np.sum and np.mean in a function
# of Numba, nansum and nanmean of Bottleneck, and sum of NumExpr add one number after the other to a float32, which ends
# at 2**24. numpy adds in a tree, and is right. A mean over an epoch's losses, a mask, or a large image is too small by
# any factor, and already by percents where numbers differ in size; variances are wrong with it. np.nanmean in Numba is
# right. All of them take float64 (`astype`, or `dtype=` where there is one). Nothing is said.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet numba==0.68.1 bottleneck==1.6.0 numexpr==2.14.2 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
from importlib.metadata import version

import bottleneck
import numba
import numexpr
import numpy as np

assert [version(name) for name in ("numba", "bottleneck", "numexpr")] == ["0.68.1", "1.6.0", "2.14.2"]
ones = np.ones(2**25, "float32")
seen = {
    "numpy": (np.sum(ones), np.mean(ones), np.var(ones)),
    "numba": tuple(numba.njit(lambda array, each=each: each(array))(ones) for each in (np.sum, np.mean, np.var)),
    "bottleneck": (bottleneck.nansum(ones), bottleneck.nanmean(ones), bottleneck.nanvar(ones)),
    "numexpr": (numexpr.evaluate("sum(ones)"), numexpr.evaluate("sum(ones)") / ones.size),
}
for library, results in seen.items():
    print(f"{library}: sum, mean, variance of {ones.size} ones are {', '.join(str(float(each)) for each in results)}")
assert seen["numpy"] == (2**25, 1, 0), "changed: numpy"
for library, variance in (("numba", [0.25]), ("bottleneck", [0.125]), ("numexpr", [])):
    assert [float(each) for each in seen[library]] == [2**24, 0.5, *variance], f"changed: {library}"
exact = ones.astype("float64")
assert numba.njit(lambda array: np.mean(array))(exact) == bottleneck.nanmean(exact) == 1, "changed: float64"
assert numexpr.evaluate("sum(exact)") == 2**25, "changed: float64"
assert numba.njit(lambda array: np.nanmean(array))(ones) == 1, "changed: nanmean"
PYTHON
