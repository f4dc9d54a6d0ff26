"""What ranks tell each other between steps: requests to stop, and where their time went."""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from hvdtrain.buffer import Buffer
from hvdtrain.collective import collective
from hvdtrain.core import operations
from hvdtrain.core.context import newcomer_waits
from hvdtrain.core.membership import Context
from hvdtrain.errors import STOPPING
from hvdtrain.types import ReduceOp
from hvdtrain.world import OPEN_MPI, promised_world

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


RESOURCE_FIELDS = ("cpu_percent", "memory_bytes", "gpu_memory_bytes")


class ResourceMonitor:
    """Reads the resources used by this process; cheap enough for every step."""

    def __init__(self) -> None:
        self._time, self._cpu = time.perf_counter(), time.process_time()

    def read(self) -> list[float]:
        """Return RESOURCE_FIELDS since the last call, or since it was made; NaN if unknown."""
        now, cpu = time.perf_counter(), time.process_time()
        percent = 100 * (cpu - self._cpu) / max(now - self._time, 1e-9)
        self._time, self._cpu = now, cpu
        with open("/proc/self/statm", "rb", buffering=0) as file:
            resident = int(file.read().split()[1]) * _PAGE_BYTES
        gpu = _cuda()
        return [percent, float(resident), float(gpu.memory_reserved()) if gpu else math.nan]


def _cuda() -> Any:
    """Return torch.cuda if this process uses a GPU with torch, else None."""
    torch = sys.modules.get("torch")  # importing it takes seconds
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def peak_memory() -> str:
    """Return the most memory that this process has had, for people."""
    text = f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB"
    gpu = _cuda()
    return f"{text} and {gpu.max_memory_reserved() / 2**20:.0f} MiB of the GPU" if gpu else text


# What signal.signal() takes and returns.
_Handler = Callable[[int, FrameType | None], Any] | int | None


def stop_signals(environ: Mapping[str, str]) -> tuple[signal.Signals, ...]:
    """Return the signals that ask a rank to stop: SIGUSR1, SIGINT, and SIGTERM if there is time.

    Open MPI's mpirun leaves its ranks a second, or a quarter of one, between SIGTERM and SIGKILL.
    """
    promised = promised_world(environ)
    if promised is not None and promised.launcher == OPEN_MPI:
        return (signal.SIGUSR1, signal.SIGINT)
    return (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Records signals to this process during a `with` block; does nothing in other threads."""

    def __init__(self) -> None:
        self.asked = self.interrupted = self.leaves = False
        self._before: dict[int, _Handler] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in stop_signals(os.environ):
                if number == signal.SIGINT and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # as for commands in the background of a shell
                self._before[number] = signal.signal(number, self._note)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def __exit__(self, *_: object) -> None:
        for number in list(self._before):
            self._restore(number)

    def accept_leave(self) -> None:
        """Take SIGUSR2 for a request that this rank leaves."""
        if threading.current_thread() is threading.main_thread():
            before = signal.signal(signal.SIGUSR2, self._note)
            self._before.setdefault(signal.SIGUSR2, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.leaves = True
            return
        self.asked = True
        if number != signal.SIGUSR1:
            self._restore(number)  # a second one ends the process at once
        if number == signal.SIGINT:
            self.interrupted = True
            if promised_world(os.environ) is None:
                with suppress(OSError):  # Ctrl-C has ended what reads it, too
                    os.write(2, f"\n{STOPPING}\n".encode())

    def _restore(self, number: int) -> None:
        try:
            before = self._before.pop(number)
        except KeyError:  # restored by a signal in the middle of __exit__
            return
        signal.signal(number, signal.SIG_DFL if before is None else before)


# Interval of the exchange; a scheduler leaves at least some seconds after its signal.
_EVERY_SECONDS = 0.5

# Columns of a row: steps to the next exchange, stop requested, leave requested, another rank waits
# to join, seconds waited for communication.
_STEPS, _STOP, _LEAVE, _JOIN, _BLOCKED = _COLUMNS = range(5)


@dataclass(frozen=True)
class HeartbeatReport:
    """The result of one exchange."""

    seconds: float
    steps: int
    blocked: npt.NDArray[np.float64]  # seconds in which each rank waited for communication, [N]
    resources: npt.NDArray[np.float64]


class Heartbeat:
    """Exchanges a few numbers between ranks after the same steps, about twice a second."""

    def __init__(self, world: Context, signals: StopSignals, timers: Mapping[str, float]) -> None:
        """Take the seconds of rank 0's clock after which something is due, by name."""
        self.stop_rank: int | None = None
        self.leaving: tuple[int, ...] = ()
        self.joins = False
        self.due: set[str] = set()
        self.report: HeartbeatReport | None = None
        self._world, self._signals = world, signals
        self._timers = dict(timers)
        self._since = time.perf_counter()
        self._reset = dict.fromkeys(timers, self._since)
        self._steps = self._left = 1
        self._blocked = world.blocked.seconds
        self._monitor = ResourceMonitor()

    @collective
    def count_step(self) -> bool:
        """Count a step; return whether the ranks have exchanged (the same on all)."""
        self._left -= 1
        if self._left:
            return False
        self._exchange()
        return True

    @property
    def interrupts(self) -> bool:
        """Whether training is to be interrupted after this step, the same on all ranks."""
        return self.stop_rank is not None or bool(self.leaving) or self.joins

    def repeat_stop(self) -> None:
        """Ask again for an agreed stop, because the rank that asked may have ended before it."""
        self._signals.asked |= self.stop_rank is not None

    def done(self, timer: str, seconds: float | None = None) -> None:
        """Restart a timer."""
        self.due.discard(timer)
        if timer in self._timers:
            if seconds is not None:
                self._timers[timer] = seconds
            self._reset[timer] = time.perf_counter()

    def _exchange(self) -> None:
        topology = self._world.topology
        seconds = max(time.perf_counter() - self._since, 1e-6)
        rows = np.zeros((topology.size, len(_COLUMNS) + len(self._timers) + len(RESOURCE_FIELDS)))
        rows[topology.rank] = self._row(seconds)
        operations.allreduce(
            self._world.world, [Buffer.from_array(rows)], [rows.shape], ReduceOp.SUM, "heartbeat"
        ).run()
        first = len(_COLUMNS) + len(self._timers)
        self.report = HeartbeatReport(seconds, self._steps, rows[:, _BLOCKED], rows[:, first:])
        stopping = np.flatnonzero(rows[:, _STOP])
        self.stop_rank = int(stopping[0]) if len(stopping) else None
        self.leaving = tuple(np.flatnonzero(rows[:, _LEAVE]).tolist())
        self.joins = bool(rows[:, _JOIN].any())
        self.due |= {
            name
            for name, flag in zip(self._timers, rows[0, len(_COLUMNS) : first], strict=True)
            if flag
        }
        self._steps = self._left = int(rows[:, _STEPS].min())
        self._since = time.perf_counter()
        self._blocked = self._world.blocked.seconds

    def _row(self, seconds: float) -> list[float]:
        now = time.perf_counter()
        steps = max(1, int(self._steps * _EVERY_SECONDS / seconds))
        flags = [float(now - self._reset[name] >= after) for name, after in self._timers.items()]
        blocked = self._world.blocked.seconds - self._blocked
        asked, leaves = float(self._signals.asked), float(self._signals.leaves)
        joins = float(newcomer_waits())
        return [steps, asked, leaves, joins, blocked, *flags, *self._monitor.read()]


_LINE_SECONDS = 2.0


class RankStatistics:
    """Adds up heartbeat reports and makes a line of ranks.jsonl every few seconds (rank 0 only).

    Between two exchanges, the rank that was blocked least waited for nobody: so long was data being
    moved, on all ranks. The time that another rank was blocked beyond that, it waited.
    """

    def __init__(self, sent_bytes_per_step: int) -> None:
        self._sent = sent_bytes_per_step
        self.slowest = (0, 1.0)
        self._reset()

    def _reset(self) -> None:
        self._seconds, self._steps = 0.0, 0
        self._moving = 0.0
        self._blocked: npt.NDArray[np.float64] | float = 0.0
        self._last: HeartbeatReport | None = None

    def add(self, report: HeartbeatReport) -> None:
        self._seconds += report.seconds
        self._steps += report.steps
        self._blocked = self._blocked + report.blocked
        self._moving += float(report.blocked.min())
        self._last = report
        compute = np.maximum(self._seconds - self._blocked, 0.0)
        rank = int(compute.argmax())
        self.slowest = (rank, float(compute[rank]) / self._seconds)

    def line(self, step: int, seconds: float, last: bool = False) -> dict[str, Any] | None:
        """Return a line of ranks.jsonl and start the next; None if too little time has passed."""
        if self._last is None or (self._seconds < _LINE_SECONDS and not last):
            return None
        blocked = np.asarray(self._blocked)
        line = {
            "step": step,
            "seconds": seconds,
            "span": self._seconds,
            "compute": np.maximum(self._seconds - blocked, 0.0).tolist(),
            "waiting": (blocked - self._moving).tolist(),
            "moving": [self._moving] * len(blocked),
            "sent_bytes": [self._sent * self._steps] * len(blocked),
        }
        for number, name in enumerate(RESOURCE_FIELDS):
            column = self._last.resources[:, number].tolist()
            line[name] = [None if math.isnan(value) else value for value in column]
        self._reset()
        return line
