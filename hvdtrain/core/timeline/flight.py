"""The flight record: a file of each rank about its last operations, for a job that hangs or dies.

It has the structure of torch's flight recorder, in JSON instead of pickle: once it reads that,
`torch.distributed.flight_recorder` compares the files of all ranks.
"""

from __future__ import annotations

import ast
import json
import os
import time
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.core.agreement.channel import Channel
from hvdtrain.core.exits import write_message
from hvdtrain.core.timeline.recorder import Entry, Recorder
from hvdtrain.files import replacing
from hvdtrain.topology import Topology

_VERSION = "2.10"  # of the files that torch 2.13 writes
# What has not run on all ranks has no place in their common order, and is known by its name.
_FIRST_PENDING = 1 << 32
_KINDS = {
    "allreduce": "all_reduce",
    "optimizer step": "all_reduce",
    "allgather": "all_gather_v",
    "broadcast": "broadcast",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter_v",
}


class FlightRecord:
    """The file of this rank."""

    def __init__(self, folder: str, topology: Topology, engine: str) -> None:
        self._path = Path(folder).absolute() / f"flight_rank_{topology.rank}"
        # The analyzer knows some backends of torch only.
        self._title, self._backend = topology.title, "nccl" if engine == "nccl" else "gloo"

    def clear(self) -> None:
        """Remove the files of an earlier job."""
        for path in self._path.parent.glob("flight_rank_*"):
            with suppress(OSError):
                path.unlink()

    def write(self, recorders: Sequence[tuple[Channel, Recorder]]) -> None:
        """Write what all channels have done, and what is pending in them (in any thread)."""
        groups: dict[str, dict[str, str]] = {}
        entries: list[dict[str, Any]] = []
        for channel, recorder in recorders:
            ranks = str(list(channel.ranks))
            uid = f"{zlib.crc32(ranks.encode()):08x}.{channel.number}"
            groups[uid] = {"name": uid, "desc": channel.label, "ranks": ranks}
            # The last one under each number: one that has failed may be submitted again.
            own = {
                entry["record_id"]: entry
                for each in recorder.entries(channel.queue.operations())
                for entry in [self._entry(each, [uid, channel.label])]
            }
            entries += own.values()
        entries.sort(key=lambda entry: entry["record_id"])
        content = {"version": _VERSION, "pg_config": groups, "entries": entries}
        try:
            os.makedirs(self._path.parent, exist_ok=True)
            with replacing(self._path) as file:
                file.write(json.dumps(content).encode())
        except OSError as error:
            text = f"flight record {self._path} cannot be written ({error.strerror or error})"
            write_message(self._title, text)

    def _entry(self, entry: Entry, group: list[str]) -> dict[str, Any]:
        request = entry.request
        details = dict(request.details)
        shapes = details.get("shape") or details.get("shape beyond the first")
        sizes = ast.literal_eval(f"[{shapes}]") if shapes else [[entry.nbytes]]
        types = details.get("dtype", "uint8").split(", ")
        number = entry.number or _FIRST_PENDING + zlib.crc32(request.key.encode())
        kind = _KINDS.get(request.operation, "barrier")
        states = "scheduled", "started", "completed"
        zero = time.time_ns() - time.perf_counter_ns()
        created, began, ended = (
            None if seconds is None else zero + round(seconds * 1e9)
            for seconds in (entry.submitted, entry.began, entry.ended)
        )
        return {
            "record_id": number,
            "pg_id": 0,
            "process_group": group,
            "collective_seq_id": number,
            "p2p_seq_id": 0,
            "op_id": number,
            "is_p2p": False,
            "profiling_name": f"{self._backend}:{kind} {request.subject.replace(':', '.')}",
            "input_sizes": sizes,
            "output_sizes": sizes,
            "input_dtypes": types,
            "output_dtypes": types,
            "state": states[2 if ended else 1 if began else 0],
            "time_created_ns": created,
            "time_discovered_started_ns": began,
            "time_discovered_completed_ns": ended,
            "retired": ended is not None,
            "frames": [],
        }
