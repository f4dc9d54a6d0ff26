"""Reduction in shared memory, by processes that need no MPI to meet."""

import ctypes.util
import mmap
import multiprocessing
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from logged import logged

from hvdtrain.buffer import Buffer
from hvdtrain.compiled import KernelError
from hvdtrain.core.ordered import tree_sum
from hvdtrain.engines.shared_memory import kernel as node_kernel
from hvdtrain.engines.shared_memory.kernel import load_kernel, open_kernel
from hvdtrain.engines.shared_memory.memory import SystemFailure, share_memory
from hvdtrain.engines.shared_memory.node_group import (
    CHUNK_BYTES,
    SLOT_BYTES,
    WATCHED,
    NodeGroup,
    open_node_group,
)
from hvdtrain.errors import ConnectionLostError
from hvdtrain.types import DType, ReduceOp

KERNEL = load_kernel()
FORK = multiprocessing.get_context("fork")
# A limit that only ends a hang: other tests share the cores.
HANGS_AFTER_SECONDS = 300
# Below and above what is staged at once, several chunks, and sizes that no slice divides.
COUNTS = (1, 63, 16_384, 16_385, 65_537, 300_001, 1_000_003)


class Meeting:
    """Gathers values of forked processes through one queue for each."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._queues = [FORK.SimpleQueue() for _ in range(size)]
        self._early: list[tuple[int, int, Any]] = []
        self._turn = 0

    def gather(self, rank: int) -> Callable[[Any], list[Any]]:
        def allgather(value: Any) -> list[Any]:
            for queue in self._queues:
                queue.put((self._turn, rank, value))
            while sum(turn == self._turn for turn, _, _ in self._early) < self.size:
                self._early.append(self._queues[rank].get())
            now = {who: told for turn, who, told in self._early if turn == self._turn}
            self._early = [entry for entry in self._early if entry[0] != self._turn]
            self._turn += 1
            return [now[other] for other in range(self.size)]

        return allgather


def in_processes(size: int, work: Callable[[NodeGroup, int], None]) -> list[int | None]:
    meeting = Meeting(size)

    def run(rank: int) -> None:
        assert KERNEL is not None
        team = open_node_group(KERNEL, rank, size, meeting.gather(rank))
        assert team is not None
        work(team, rank)
        team.close()

    processes = [FORK.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(HANGS_AFTER_SECONDS)
    return [process.exitcode for process in processes]


def values(rank: int, count: int) -> npt.NDArray[np.float32]:
    """Return numbers whose sum depends on the order in which they are added."""
    return np.random.default_rng(rank).normal(size=count).astype(np.float32)


@pytest.mark.parametrize("size", [3, 7])
def test_sums_have_the_bits_of_numpys(size: int) -> None:
    """postscale * ((x_0 p_0 + x_1 p_1) + (x_2 p_2 + x_3 p_3) ...), each step rounded to float32."""

    def work(team: NodeGroup, rank: int) -> None:
        engine_memory = team.arena.empty(max(COUNTS) * 4)
        assert engine_memory is not None
        for count in COUNTS:
            terms = [values(other, count) * np.float32(0.3 + other) for other in range(size)]
            expected = np.multiply(tree_sum(terms), np.float32(1 / 3))
            private, source = np.empty(count, np.float32), values(rank, count)
            shared = engine_memory[: count * 4].view(np.float32)
            for given, result in ((source, private), (shared, shared)):
                given[:] = values(rank, count)
                target = Buffer.from_array(result)
                origin = target if given is result else Buffer.from_array(given)
                team.allreduce(origin, target, ReduceOp.SUM, 0.3 + rank, 1 / 3)
                assert result.tobytes() == expected.tobytes(), count
            assert source.tobytes() == values(rank, count).tobytes()

    assert in_processes(size, work) == [0] * size


def test_operations_in_any_order_beside_late_ranks() -> None:
    def work(team: NodeGroup, rank: int) -> None:
        orders, delays = np.random.default_rng(7), np.random.default_rng(rank)
        for turn in range(300):
            count = int(orders.choice([1, 300, 1536, 1537, 20_000, 70_000]))
            wave = (np.arange(count) + turn) % 100
            if delays.random() < 0.2:
                time.sleep(0.002)
            if orders.random() < 0.5:
                found = np.empty(3 * count, np.uint8)
                own = Buffer.from_array((wave + rank).astype(np.uint8))
                team.allgather(own, Buffer.from_array(found), [count] * 3)
                assert (found.reshape(3, count) == wave + np.arange(3)[:, None]).all()
            elif orders.random() < 0.7:
                found = (wave * (rank + 1)).astype(np.float32)
                both = Buffer.from_array(found)
                team.allreduce(both, both, ReduceOp.SUM, 1.0, 1.0)
                assert (found == 6 * wave).all()
            else:
                most = np.array([turn, rank], np.uint64)
                pending = team.start_max(most)
                pending.wait()
                assert most.tolist() == [turn, 2]

    assert in_processes(3, work) == [0] * 3


def test_all_ranks_learn_of_an_end_that_few_of_them_watch_for() -> None:
    size, ending = WATCHED + 4, 3

    def work(team: NodeGroup, rank: int) -> None:
        found = [os.path.realpath(file) for file in Path("/proc/self/fd").iterdir()]
        assert sum("pidfd" in file for file in found) == WATCHED
        team.meet()
        if rank == ending:
            os._exit(9)
        with pytest.raises(ConnectionLostError, match=rf"\(number {ending} of {size}\) has ended"):
            team.meet()

    assert in_processes(size, work) == [9 if rank == ending else 0 for rank in range(size)]


def test_a_node_with_64_ranks() -> None:
    """All three ways: shown whole, where it lies, and through the staging areas."""

    def work(team: NodeGroup, rank: int) -> None:
        memory = team.arena.empty(4 * 20_000)
        assert memory is not None
        for array in (np.empty(100), memory.view(np.float32), np.empty(20_000, np.float32)):
            array[:] = rank + np.arange(array.size) % 7
            buffer = Buffer.from_array(array)
            team.allreduce(buffer, buffer, ReduceOp.SUM, 1.0, 0.5)
            assert (array == (64 * 63 / 2 + 64 * (np.arange(array.size) % 7)) / 2).all()

    assert in_processes(64, work) == [0] * 64


@pytest.mark.parametrize("size", [1, 2, 40])
def test_gathers_of_few_bytes_map_one_page_of_each_rank(size: int) -> None:
    def work(team: NodeGroup, rank: int) -> None:
        for most in (4, 768, 768, 769, CHUNK_BYTES // 2, 9):
            pieces = [
                np.arange(most * (other % 3) // 2) * (other + 1) % 65521 for other in range(size)
            ]
            mine, every = pieces[rank].astype(np.uint16), np.concatenate(pieces)
            found = np.empty(every.size, np.uint16)
            counts = [piece.size for piece in pieces]
            team.allgather(Buffer.from_array(mine), Buffer.from_array(found), counts)
            assert (found == every).all()
            if most == 768:
                text = Path("/proc/self/smaps").read_text().partition("/memfd:hvdtrain-memory")[2]
                mapped = int(text.partition("Rss:")[2].split()[0]) * 1024
                own, around = SLOT_BYTES + 4 * CHUNK_BYTES, 2 * 15 * mmap.PAGESIZE
                assert mapped <= own + around + mmap.PAGESIZE * (size - 1)

    assert in_processes(size, work) == [0] * size


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_every_half_is_scaled_in_float32_and_rounded_once(dtype: DType) -> None:
    assert KERNEL is not None
    team, kind = open_node_group(KERNEL, 0, 1, lambda value: [value]), getattr(torch, dtype.value)
    assert team is not None
    for factor in (1.0, 1 / 3, 1e-4, 300.0):
        found = np.arange(1 << 16, dtype=np.uint16)
        halves = torch.from_numpy(found.copy()).view(kind)
        buffer = Buffer.from_array(found, dtype)
        team.allreduce(buffer, buffer, ReduceOp.SUM, factor, 1.0)
        wanted = (halves.float() * torch.tensor(factor)).to(kind)
        numbers = ~wanted.isnan()
        assert torch.equal(torch.from_numpy(found).view(kind).isnan(), ~numbers)
        assert torch.equal(torch.from_numpy(found)[numbers], wanted.view(torch.uint16)[numbers])


def test_without_memory_to_share() -> None:
    assert share_memory(1 << 62, 0, 1, lambda value: [value]) is None
    # A first rank that has none to give tells of no descriptor.
    assert share_memory(4096, 1, 2, lambda value: [_instead(value), value]) is None


def _instead(value: object) -> object:
    tells = isinstance(value, tuple) and not isinstance(value, SystemFailure)
    return (os.getpid(), 1, None, SystemFailure("none here")) if tells else value


def test_memory_that_the_control_group_does_not_allow(small_group: Path) -> None:
    """Without the look at its limit, the kernel kills a rank."""

    def work(team: NodeGroup, rank: int) -> None:
        (small_group / "cgroup.procs").write_text(str(os.getpid()))
        memory = team.arena.empty(1 << 20)
        assert memory is not None
        found: list[object] = []
        heard = logged(lambda: found.extend(team.arena.empty(100 << 20) for _ in range(2)))
        assert found == [None, None]
        assert len(heard) == (1 if rank == 0 else 0), heard
        assert rank or heard[0] == (
            "hvdtrain: the ranks of this node communicate through MPI, which is slower: each of 2 "
            "ranks cannot share 102,400 KiB (the machine or the control group has too little "
            "memory left)"
        )

    assert in_processes(2, work) == [0, 0]


def test_the_kernel_is_there() -> None:
    """Where a compiler is, installing builds it; without it ranks add with numpy."""
    assert KERNEL is not None


def test_a_kernel_that_cannot_be_used_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.so").write_text("no library")
    whole = Path(KERNEL._name if KERNEL else "").read_bytes()
    # As if compiled before a comment was changed: structures and sizes are the same.
    (tmp_path / "old.so").write_bytes(whole.replace(b"All-reduce among", b"All-Reduce among"))
    (tmp_path / "header.so").write_bytes(whole.replace(b"What kernels need", b"What Kernels need"))
    for path, reason in (
        (None, "not compiled when hvdtrain was installed: install a C compiler"),
        (tmp_path / "text.so", r"text\.so does not load \(.*\): install hvdtrain again"),
        (Path(ctypes.util.find_library("c") or ""), "does not load .*hvd_source"),
        (tmp_path / "old.so", r"old\.so was not compiled from .*node_kernel\.c: install"),
        (tmp_path / "header.so", r"header\.so was not compiled from .*node_kernel\.c: install"),
    ):
        with pytest.raises(KernelError, match=reason):
            open_kernel(path)
    # As in an image from which sources were removed.
    monkeypatch.setattr(node_kernel, "_SOURCE", tmp_path / "node_kernel.c")
    with pytest.raises(KernelError, match=r"node_kernel\.c cannot be read \(.*\): install"):
        open_kernel(Path(KERNEL._name if KERNEL else ""))


def test_many_open_files_do_not_matter() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 3000:
        pytest.skip(f"this user may open but {hard} files")

    def work(team: NodeGroup, rank: int) -> None:
        team.peers.check()

    resource.setrlimit(resource.RLIMIT_NOFILE, (3000, hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        assert in_processes(2, work) == [0, 0]
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
