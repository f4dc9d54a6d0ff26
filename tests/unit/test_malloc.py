"""What is freed stays for the next tensors."""

from __future__ import annotations

import subprocess
import sys

import pytest

# Three pieces that are freed together; glibc would give them back.
FAULTS = """
import resource, sys
import numpy as np
from hvdtrain.core.malloc import keep_freed_memory
took = keep_freed_memory({word: "1" for word in sys.argv[1:]})
def work():
    for array in [np.empty(16 << 20, np.uint8) for _ in range(3)]:
        array[:] = 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
work()
before = work()
for _ in range(5):
    after = work()
print(took, after - before)
"""


@pytest.mark.parametrize(
    ("word", "least", "most"),
    [("", 0, 500), ("MALLOC_TRIM_THRESHOLD_", 3_000, 100_000)],
)
def test_page_faults_of_new_tensors(word: str, least: int, most: int) -> None:
    command = [sys.executable, "-c", FAULTS, *filter(None, [word])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    took, faults = done.stdout.split()
    assert took == str(not word)
    assert least <= int(faults) <= most
