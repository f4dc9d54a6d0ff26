"""What is freed stays for the next tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Three pieces that are freed together; glibc would give them back.
FAULTS = """
import resource, sys
import numpy as np
from hvdtrain.core.process.tuning import keep_freed_memory, keep_large_memory
pieces, nbytes, *words = sys.argv[1:]
environ = {word: "1" for word in words}
took = keep_freed_memory(environ)
if int(nbytes) > 32 << 20:
    took = keep_large_memory(int(pieces) * int(nbytes), environ)
def work():
    for array in [np.empty(int(nbytes), np.uint8) for _ in range(int(pieces))]:
        array[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
before = work()
for _ in range(5):
    after = work()
print(took, after - before)
"""


@pytest.mark.parametrize(
    ("pieces", "mib"), [(3, 16), (3, 120)], ids=["freed memory", "large memory"]
)
@pytest.mark.parametrize(
    ("word", "least", "most"),
    [("", 0, 500), ("MALLOC_TRIM_THRESHOLD_", 3_000, 1_000_000)],
)
def test_page_faults_of_new_tensors(
    pieces: int, mib: int, word: str, least: int, most: int
) -> None:
    sizes = [str(pieces), str(mib << 20)]
    command = [sys.executable, "-c", FAULTS, *sizes, *filter(None, [word])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    took, faults = done.stdout.split()
    assert took == str(not word)
    assert least <= int(faults) <= most
