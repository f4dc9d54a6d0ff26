"""What is freed stays for the next tensors."""

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest

from hvdtrain.core import context
from hvdtrain.core.arrays.collectives import MemoryPool, empty
from hvdtrain.core.tuning import LONGEST_SWITCH_SECONDS

# Three pieces that are freed together; glibc would give them back.
FAULTS = """
import resource, sys
import numpy as np
from hvdtrain.core.tuning import keep_freed_memory, keep_large_memory
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
    ("word", "least", "most"), [("", 0, 500), ("MALLOC_TRIM_THRESHOLD_", 3_000, 1_000_000)]
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


ABORTING = """
import os, sys
from hvdtrain.core import exits
from hvdtrain.core.exits import ExitGuard
from hvdtrain.topology import Topology

descriptor, exits._LONGEST_SECONDS = int(sys.argv[1]), float(sys.argv[2])

def abort(code):
    os.write(descriptor, b"aborted")
    os._exit(code)

ExitGuard(Topology.from_nodes(0, [0], ["here"]), lambda: None, abort, False, lambda: None,
          lambda kind, text: None).install()
raise ValueError("the reason")
"""


def test_an_abort_waits_until_its_reason_is_read() -> None:
    """As with an mpiexec that reads what ranks print after what they ask it to do."""
    told, tell = os.pipe()
    argv = [sys.executable, "-c", ABORTING, str(tell), "60"]
    with subprocess.Popen(argv, stderr=subprocess.PIPE, pass_fds=[tell]) as process:
        os.close(tell)
        assert process.stderr is not None
        first = os.read(process.stderr.fileno(), 1)  # blocks until there is something
        time.sleep(0.2)
        early = bool(select.select([told], [], [], 0)[0])
        rest = process.stderr.read()
    with os.fdopen(told, "rb") as file:
        assert file.read() == b"aborted"
    assert not early
    assert b"ValueError: the reason" in first + rest
    assert process.returncode == 1


@pytest.mark.parametrize("output", [subprocess.PIPE, None], ids=["unread", "closed"])
def test_an_abort_does_not_wait_for_ever(output: int | None) -> None:
    code = ABORTING if output else f"import os; os.close(1); os.close(2)\n{ABORTING}"
    argv = [sys.executable, "-c", code, str(os.open(os.devnull, os.O_WRONLY)), "0.1"]
    descriptor = int(argv[-2])
    with subprocess.Popen(argv, stdout=output, stderr=output, pass_fds=[descriptor]) as process:
        os.close(descriptor)
        assert process.wait(300) == 1


def test_the_reason_is_written_beside_torch_distributed() -> None:
    """Its hook holds back what the hooks before it write."""
    beside = ABORTING.replace(
        "raise",
        """import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
raise""",
    )
    argv = [sys.executable, "-c", beside, str(os.open(os.devnull, os.O_WRONLY)), "60"]
    ended = subprocess.run(argv, stderr=subprocess.PIPE, pass_fds=[int(argv[-2])], check=False)
    os.close(int(argv[-2]))
    assert ended.returncode == 1
    assert ended.stderr.count(b"ValueError: the reason") == 1


# Python keeps whole microseconds.
about = partial(pytest.approx, abs=2e-6)


@pytest.fixture(autouse=True)
def the_interval_of_before() -> Iterator[None]:
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("before", [0.005, 0.0001])
def test_while_this_is_a_rank(before: float) -> None:
    sys.setswitchinterval(before)
    context.init("local")
    assert sys.getswitchinterval() == pytest.approx(min(before, LONGEST_SWITCH_SECONDS), rel=0.02)
    context.shutdown()
    assert sys.getswitchinterval() == about(before)


def test_what_the_program_has_chosen_stays() -> None:
    context.init("local")
    sys.setswitchinterval(0.002)
    context.shutdown()
    assert sys.getswitchinterval() == about(0.002)


TRIES, THREADS = 5000, 4
HANGS_AFTER_SECONDS = 300


def test_a_block_is_lent_to_one_thread_at_a_time() -> None:
    memory = MemoryPool(empty([8], np.uint8))
    together = threading.Barrier(THREADS)
    overwritten = [0] * THREADS

    def borrow(number: int) -> None:
        for _ in range(TRIES):
            together.wait(HANGS_AFTER_SECONDS)
            block = memory.allocate()
            block[:] = number
            together.wait(HANGS_AFTER_SECONDS)  # all have one
            overwritten[number] += int((block != number).any())
            del block

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=borrow, args=[number]) for number in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert overwritten == [0] * THREADS


def test_what_is_given_back_is_lent_again() -> None:
    first = empty([8], np.uint8)
    memory = MemoryPool(first)
    lent = memory.allocate()
    view = lent[2:4]
    assert not np.shares_memory(lent, memory.allocate())
    del lent
    assert not np.shares_memory(memory.allocate(), view)  # which shows the first block still
    del view
    assert np.shares_memory(memory.allocate(), first)
