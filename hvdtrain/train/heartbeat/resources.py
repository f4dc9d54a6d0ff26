"""Resources that this process uses."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class ResourceUsage:
    """Resources used by one process."""

    cpu_percent: float
    memory_bytes: int
    gpu_memory_bytes: int | None


class ResourceMonitor:
    """Reads the resource usage of this process; cheap enough for every step."""

    def __init__(self) -> None:
        self._time, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> ResourceUsage:
        """Return the usage since the last call, or since the monitor was made."""
        now, cpu = time.perf_counter(), time.process_time()
        percent = 100 * (cpu - self._cpu) / max(now - self._time, 1e-9)
        self._time, self._cpu = now, cpu
        return ResourceUsage(percent, _resident_bytes(), _gpu_bytes())


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb", buffering=0) as file:
        return int(file.read().split()[1]) * _PAGE_BYTES


def _gpu_bytes() -> int | None:
    torch = sys.modules.get("torch")  # importing it takes seconds
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_reserved())
