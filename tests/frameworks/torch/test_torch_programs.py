"""Random training programs give on 1, 2 and 3 ranks what one process gives."""

import json
import os
import select
import socket
import tempfile
import time
from collections import Counter
from pprint import pformat
from typing import Any, Self

import pytest
from job import Job
from paths import TESTS
from ranks import launch
from torch_drawing import draw

# So many, or as many as HVDTRAIN_PROGRAMS says, by number of ranks.
_RANKS = {1: 20, 2: 65, 3: 65}
# What is left of programs that have found a fault, by number of ranks.
_TWO = {"optimizers": ["sgd", "sgd"]}
_TABLE = {"layers": [{"kind": "embedding", "sparse": True}], "sparse_as_dense": True}
_FOUND: dict[int, list[dict[str, Any]]] = {
    1: [],
    2: [
        # backward() waited for what another rank fills only in its step.
        {
            "layers": [{}, {}, {"kind": "unused"}, {"ranks": [1, 0]}],
            "steps": [{"sync": True}, {}],
            "groups": 2,
            **_TWO,
        },
        # Results of synchronize() were removed, and a rank waited for the next gradient.
        {
            "layers": [{}, {"ranks": [0, 1]}],
            "steps": [{"sync": True, "skip": True}, {"zero": "by hand"}],
            **_TWO,
        },
        # Ranks dropped the gradients of a skipped step at different times.
        {"steps": [{"skip": True, "rows": [1, 2]}, {"closure": True, "rows": [2, 2]}]},
        # Gradients of other ranks' rows were not weighted, with gradients and with weights.
        *(
            {"layers": [{}, {"kind": "batchnorm"}], "steps": [{"rows": [2, 3]}], "exchange": name}
            for name in ("average", "local:steps=1")
        ),
        # Momenta of complex parameters were not averaged.
        {
            "layers": [{"kind": "complex"}],
            "optimizers": ["momentum"],
            "exchange": "postlocal:after=1,steps=1,state=average",
            "steps": [{}, {}],
        },
        # The loss of a closure was not divided by the number of all ranks, as gradients are.
        {"optimizers": ["wolfe"], "steps": [{"closure": True}], "join": [1, 0], "mode": "average"},
        {"layers": [{"kind": "scalar", "dtype": "bf16"}], "world": {"ENGINE": "gloo"}},
        {"layers": [{"kind": "scalar"}], "optimizers": ["adam"], "sharded": True},
        {"layers": [{}, {"ranks": [1, 0]}], "steps": [{"graph": True}] * 2, "sharded": True},
        # An optimizer without any gradient was told to synchronize, which it had done.
        {
            "layers": [{"steps": [0, 1]}],
            "steps": [{"sync": True, "clip": "own"}],
            "pre_hook": 0.01,
            "sharded": True,
        },
        # The optimizer before was not deleted.
        {"steps": [{}, {"before": [{"kind": "wrap"}]}], "sharded": True},
        # Gradients were sparse on ranks outside the process set.
        {"optimizers": ["adam"], "members": [0], "mode": "average", **_TABLE},
        {"steps": [{"clip": "own"}], "members": [0], "mode": "average", **_TABLE},
    ],
    3: [],
}


# What programs import only when they use it, too: on a loaded machine that looks like a hang.
WARM = "torch torch._dynamo.config"

_PROGRAMS = TESTS / "helpers" / "programs"
_START_SECONDS, _PATIENCE_SECONDS = 300.0, 120.0


class Ranks:
    """Ranks of one launch, which is started again after a program that ends it."""

    def __init__(self, np: int) -> None:
        self.np = np
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
            result |= {"answers": answers, "missing": missing}
            result["stderr"] = self._job.stderr[-3000:] if self._job else ""  # with stacks
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
            self._job = launch(_PROGRAMS / "program_rank.py", self.np, args=[address], warm=WARM)
            self._streams, self._sockets = {}, {}
            for _ in range(self.np):
                connection, _ = listener.accept()
                stream = connection.makefile("rw")
                rank = json.loads(stream.readline())
                self._streams[rank], self._sockets[rank] = stream, connection

    def _collect(self) -> dict[int, Any]:
        """Return the answers of the ranks that give one in time."""
        answers: dict[int, Any] = {}
        self._ended = False
        deadline = time.monotonic() + _PATIENCE_SECONDS
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
                    deadline = min(deadline, time.monotonic() + _PATIENCE_SECONDS / 2)
        return answers

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


FAULTS = ("different", "error", "hang", "crash")


def script(program: dict[str, Any], result: dict[str, Any], np: int) -> str:
    """Return a program as a script that stands alone."""
    text = (_PROGRAMS / "torch_programs.py").read_text()
    text = text.replace("from __future__ import annotations\n", "", 1)
    say = json.dumps(result, indent=1)[:6000]
    return (
        f"# python -m hvdtrain run -np {np} -- SCRIPT\n"
        "from __future__ import annotations\n\n"
        f"PROGRAM = {pformat(program, sort_dicts=False)}\n\n# It gave:\n"
        + "".join(f"# {line}\n" for line in say.replace("\\n", "\n").splitlines())
        + f"\n{text}\n\nimport faulthandler\nfaulthandler.dump_traceback_later(60)\n"
        "hvd.init()\nprint(hvd.rank(), run(PROGRAM, hvd.rank(), hvd.size()), flush=True)\n"
        "faulthandler.cancel_dump_traceback_later()\n"
    )


@pytest.mark.parametrize("np", [1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_programs_give_what_one_process_gives(np: int) -> None:
    count = int(os.environ.get("HVDTRAIN_PROGRAMS", _RANKS[np]))
    programs: list[tuple[int | None, Any]] = [(seed, draw(seed)) for seed in range(count)]
    programs += [(None, program) for program in _FOUND[np]]
    trained = 0
    with Ranks(np) as ranks:
        for seed, program in programs:
            result = ranks.run(program)
            faults = FAULTS if seed is not None else (*FAULTS, "refused", "invalid")
            assert result["outcome"] not in faults, f"seed {seed}\n{script(program, result, np)}"
            trained += result["outcome"] == "equal"
    assert trained >= 0.7 * len(programs)  # one rank may have no rows


def test_a_wrong_program_is_found() -> None:
    with Ranks(2) as ranks:
        assert ranks.run({"steps": [{"rows": [2]}], "wrong": 1e-6})["outcome"] == "different"
        assert ranks.run({})["outcome"] == "equal"
