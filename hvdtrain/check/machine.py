"""What `hvdtrain check` reports on this machine: cores, memory, and whether ranks can share it."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import asdict, dataclass, fields

from hvdtrain.check.probe import ProbeError, Section, ask_python
from hvdtrain.control_groups import Memory, cpu_limit, find_memory, own_groups, read_file

_SHM = "/dev/shm"
_TRIAL_BYTES = 1 << 20
_LITTLE_SHM_BYTES = 64 << 20
_ALLOCATORS = {"torch": "PyTorch", "tensorflow": "TensorFlow"}


@dataclass(frozen=True)
class Cores:
    """The cores of this machine, and how many of them this process may use."""

    machine: int
    affinity: int
    limit: float | None

    @property
    def usable(self) -> float:
        """Number of cores that ranks can use here."""
        return min(self.affinity, self.machine if self.limit is None else self.limit)


@dataclass(frozen=True)
class SharedMemory:
    """The shared memory of this node."""

    size_bytes: int
    free_bytes: int
    objection: str


def find_cores() -> Cores:
    """Return the cores of this machine and this process."""
    return Cores(
        machine=os.cpu_count() or 1,
        affinity=len(os.sched_getaffinity(0)),
        limit=cpu_limit(own_groups(), read_file),
    )


def find_shared_memory() -> SharedMemory:
    """Return the state of /dev/shm, and try a segment of the kind that ranks share."""
    try:
        found = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(0, 0, _segment_objection())
    return SharedMemory(
        found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, _segment_objection()
    )


def _segment_objection() -> str:
    if not hasattr(os, "memfd_create"):
        return "this system has no memfd"
    try:
        descriptor = os.memfd_create("hvdtrain-check")
    except OSError as error:
        return f"memfd_create: {error.strerror}"
    try:
        os.posix_fallocate(descriptor, 0, _TRIAL_BYTES)
        os.close(os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR))
    except OSError as error:
        return f"a memfd cannot be reserved or opened by others: {error.strerror}"
    finally:
        os.close(descriptor)
    return ""


def check_cores() -> Section:
    """Report how many cores this process may use."""
    cores = find_cores()
    line = f"{cores.usable:g} of {cores.machine}"
    if cores.affinity < cores.machine:
        line += f"; bound to {cores.affinity}"
    if cores.limit is not None:
        line += f"; the control group allows {cores.limit:g}"
    return Section("cores", asdict(cores), (line,))


def check_memory() -> Section:
    """Report how much memory there is, and whether ranks of this machine can share it."""
    shared = find_shared_memory()
    facts, line = _memory()
    devshm = f"/dev/shm: {_mib(shared.free_bytes)} free of {_mib(shared.size_bytes)}"
    if shared.free_bytes < _LITTLE_SHM_BYTES:
        devshm += ", which is little for data loaders (docker run --shm-size=1g)"
    kernel = _ask_kernel()
    lines = [
        line,
        devshm,
        f"segments of ranks: {shared.objection or 'work'}",
        f"compiled kernel: {kernel or 'ready'}",
    ]
    found: dict[str, object] = {**facts, "shm": asdict(shared), "kernel": kernel}
    for module, framework in _ALLOCATORS.items():
        if importlib.util.find_spec(module) is not None:
            found[f"{module}_allocator"] = allocator = _ask_allocator(module)
            lines.append(f"allocator of {framework}'s gradients: {allocator or 'ready'}")
    return Section("memory", found, tuple(lines))


def _memory() -> tuple[dict[str, int | None], str]:
    """Return the figures of this machine's memory, and a line about them."""
    try:
        memory = find_memory()
    except OSError as error:
        return dict.fromkeys(field.name for field in fields(Memory)), f"unknown: {error}"
    line = f"{_mib(memory.free_bytes)} free of {_mib(memory.machine_bytes)}"
    if memory.limit_bytes is not None:
        line += f"; the control group allows {_mib(memory.limit_bytes)}"
    return asdict(memory), line


def _ask_kernel() -> str:
    """Return the reason why ranks add with numpy instead, or ""."""
    try:
        objection: str = ask_python("-m", "hvdtrain.probes", "kernel")["objection"]
    except ProbeError as error:
        return f"it does not load ({error}), so ranks of a node add with numpy"
    return objection and f"{objection}; until then ranks of a node add with numpy"


def _ask_allocator(module: str) -> str:
    """Return the reason why gradients of a framework are copied into buckets, or ""."""
    try:
        objection: str = ask_python("-m", "hvdtrain.probes", "allocator", module)["objection"]
    except ProbeError as error:
        return f"it does not load ({error}), so gradients are copied into buckets"
    return objection and f"{objection}; until then gradients are copied into buckets"


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
