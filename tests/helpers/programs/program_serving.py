"""Ranks that stay alive and run one program after the other."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, Self

from job import Job
from ranks import launch

# What programs import only when they use it, too: on a loaded machine that looks like a hang.
WARM = "torch torch._dynamo.config"

_RANK = Path(__file__).with_name("program_rank.py")
_START_SECONDS = 300.0


class Ranks:
    """Ranks of one launch, which is started again after a program that ends it."""

    def __init__(self, module: str, np: int, patience_seconds: float = 120, **how: Any) -> None:
        self._module, self.np, self._patience, self._how = module, np, patience_seconds, how
        self._job: Job | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def run(self, program: dict[str, Any]) -> dict[str, Any]:
        """Run a program on all ranks, and return its outcome.

        Its "outcome" is "equal", "refused" by the same error everywhere, "invalid" if one process
        cannot run it, or a fault: "different", "error", "hang" or "crash".
        """
        if self._job is None:
            self._start()
        for stream in self._streams.values():
            stream.write(json.dumps([program, self.np]) + "\n")
            stream.flush()
        answers = self._collect()
        missing = [rank for rank in range(self.np) if rank not in answers]
        if missing:
            dead = self._job is not None and self._job.process.poll() is not None
            result: dict[str, Any] = {"outcome": "crash" if dead or self._ended else "hang"}
            result |= {"answers": answers, "missing": missing, "stacks": self._stacks()}
            result["stderr"] = self._job.stderr[-3000:] if self._job else ""
        else:
            result = _together([answers[rank] for rank in range(self.np)])
        if result["outcome"] not in ("equal", "invalid", "different"):
            self._stop()
        return result

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = f"{self._folder.name}/ranks"
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(address)
            listener.listen(self.np)
            listener.settimeout(_START_SECONDS)
            self._job = launch(_RANK, self.np, args=[self._module, address], **self._how)
            self._streams, self._pids, self._sockets = {}, {}, {}
            for _ in range(self.np):
                connection, _ = listener.accept()
                stream = connection.makefile("rw")
                rank, pid = json.loads(stream.readline())
                self._streams[rank], self._pids[rank] = stream, pid
                self._sockets[rank] = connection

    def _collect(self) -> dict[int, Any]:
        """Return the answers of the ranks that give one in time."""
        answers: dict[int, Any] = {}
        self._ended = False
        deadline = time.monotonic() + self._patience
        while len(answers) < self.np and not self._ended:
            waiting = {self._sockets[r]: r for r in range(self.np) if r not in answers}
            ready, _, _ = select.select(list(waiting), [], [], deadline - time.monotonic())
            if not ready:
                break
            for connection in ready:
                line = self._streams[waiting[connection]].readline()
                if not line:
                    self._ended = True
                    break
                answer = answers[waiting[connection]] = json.loads(line)
                if answer["outcome"] == "error":  # others may wait for this rank in vain
                    deadline = min(deadline, time.monotonic() + self._patience / 2)
        return answers

    def _stacks(self) -> dict[int, str]:
        files = {r: Path(f"{self._folder.name}/ranks.{r}") for r in self._pids}
        for pid in self._pids.values():
            try:
                os.kill(pid, signal.SIGUSR2)
            except ProcessLookupError:
                pass
        time.sleep(1)
        return {rank: file.read_text() for rank, file in files.items()}

    def _stop(self) -> None:
        if self._job is not None:
            for rank, stream in self._streams.items():
                stream.close()
                self._sockets[rank].close()
            self._job.__exit__()
            self._folder.cleanup()
            self._job = None


def _together(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of a program from that on each rank."""
    kinds = Counter(answer["outcome"] for answer in answers)
    if kinds["error"]:
        same = kinds["error"] == len(answers) and all(answer["clear"] for answer in answers)
        same = same and len({answer["error"].partition(":")[0] for answer in answers}) == 1
        kind = "refused" if same else "error"
        return {"outcome": kind, "error": answers[0].get("error"), "answers": answers}
    for rank, answer in enumerate(answers):
        if answer["outcome"] != "equal":
            return {**answer, "rank": rank, "answers": answers}
    if len({answer["bits"] for answer in answers if answer.get("bits")}) > 1:
        return {"outcome": "different", "where": "bits of ranks", "answers": answers}
    return {"outcome": "equal", "difference": max(answer["difference"] for answer in answers)}
