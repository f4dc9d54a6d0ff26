"""Runs random programs on ranks that stay alive, and shrinks and prints those that fail.

    python tests/helpers/programs/find_faults.py --programs 5000 --seed 0 -np 2,3 --out FOLDER

A fault is printed as a script that stands alone: python -m hvdtrain run -np N -- SCRIPT
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import select
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from pprint import pformat
from typing import Any, Self

sys.path[:0] = [str(p) for p in (Path(__file__).parent, Path(__file__).parents[1] / "launching")]

from job import Job  # noqa: E402
from ranks import launch  # noqa: E402

# What programs import only when they use it, too: on a loaded machine that looks like a hang.
WARM = "torch torch._dynamo.config"

_RANK = Path(__file__).with_name("program_rank.py")
_START_SECONDS = 300.0


class Ranks:
    """Ranks of one launch, which is started again after a program that ends it."""

    def __init__(self, module: str, np: int, patience_seconds: float = 120, **how: Any) -> None:
        self.module, self.np, self._patience, self._how = module, np, patience_seconds, how
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
            self._job = launch(_RANK, self.np, args=[self.module, address], **self._how)
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


Program = dict[str, Any]
FAULTS = ("different", "error", "hang", "crash")


def smaller(value: Any) -> Iterator[Any]:
    """Yield what is left of plain data without one of its parts, the largest parts first."""
    if isinstance(value, (dict, list)):
        places = list(value) if isinstance(value, dict) else list(range(len(value)))[::-1]
        for place in places:
            left = value.copy()
            del left[place]
            yield left
        for place in places:
            for part in smaller(value[place]):
                left = value.copy()
                left[place] = part
                yield left


def shrink(program: Program, fails: Callable[[Program], bool], tries: int = 300) -> Program:
    """Return a program that still fails, of which no part can be left out."""
    again = True
    while again:
        again = False
        for less in smaller(program):
            tries -= 1
            if tries < 0:
                return program
            if fails(less):
                program, again = less, True
                break
    return program


def signature(result: dict[str, Any]) -> str:
    if result["outcome"] in ("error", "refused", "invalid"):
        text = result.get("error") or next(a["error"] for a in result["answers"] if a.get("error"))
        return f"{result['outcome']}: " + re.sub(r"'[^']*'|\d+", "_", text)[:90]
    return result["outcome"]


def script(module: str, program: Program, result: dict[str, Any], np: int) -> str:
    """Return a program as a script that stands alone."""
    sources = [Path(__file__).with_name(f"{n}.py").read_text() for n in ("program_values", module)]
    text = "\n\n".join(
        re.sub(r"^(from __future__|from program_values).*\n", "", s, flags=re.M) for s in sources
    )
    named = os.environ.get("KERAS_BACKEND")
    backend = f"KERAS_BACKEND={named} " if named and module == "keras_programs" else ""
    say = json.dumps({k: v for k, v in result.items() if k != "stacks"}, indent=1)[:6000]
    return (
        f"# {backend}python -m hvdtrain run -np {np} -- SCRIPT\n"
        "from __future__ import annotations\n\n"
        f"PROGRAM = {pformat(program, sort_dicts=False)}\n\n# It gave:\n"
        + "".join(f"# {line}\n" for line in say.replace("\\n", "\n").splitlines())
        + f"\n{text}\n\nimport faulthandler\nfaulthandler.dump_traceback_later(60)\n"
        "hvd.init()\nprint(hvd.rank(), run(PROGRAM, hvd.rank(), hvd.size()), flush=True)\n"
        "faulthandler.cancel_dump_traceback_later()\n"
    )


def count_equal(ranks: Ranks, programs: list[tuple[int | None, Program]], about: str = "") -> int:
    """Run programs, by seed or such as must train; return how many gave what one process gives."""
    equal = 0
    for seed, program in programs:
        result = ranks.run(program)
        faults = FAULTS if seed is not None else (*FAULTS, "refused", "invalid")
        told = f"seed {seed}{about}\n{script(ranks.module, program, result, ranks.np)}"
        assert result["outcome"] not in faults, told
        equal += result["outcome"] == "equal"
    return equal


def _fails(ranks: Ranks, kind: str, drawing: Any, program: Program) -> bool:
    return (not hasattr(drawing, "allowed") or drawing.allowed(program)) and signature(
        ranks.run(program)
    ) == kind


def _where(result: dict[str, Any]) -> list[str]:
    return [str(result.get(k))[:300] for k in ("where", "right", "got", "error", "missing")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("-np", default="2,3", help="numbers of ranks, in turn")
    parser.add_argument("--module", default="torch", help="what runs them: torch, keras")
    parser.add_argument("--patience", type=float, default=60, help="seconds until one hangs")
    parser.add_argument("--out", type=Path, default=Path("failures"))
    parser.add_argument("--each", type=int, default=2, help="faults of one signature to shrink")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    drawing = importlib.import_module(f"{options.module}_drawing")
    module = f"{options.module}_programs"
    counts: Counter[str] = Counter()
    sizes = [int(n) for n in options.np.split(",")]
    warm = WARM if options.module == "torch" else ""
    ranks = {n: Ranks(module, n, options.patience, warm=warm) for n in sizes}
    seeds = range(options.seed, options.seed + options.programs)
    programs = {seed: drawing.draw(seed) for seed in seeds}
    # Making a world costs more than running a program.
    for done, seed in enumerate(sorted(seeds, key=lambda s: str(programs[s].get("world"))), 1):
        np, program = sizes[seed % len(sizes)], programs[seed]
        result = ranks[np].run(program)
        kind = signature(result)
        counts[kind] += 1
        if done % 100 == 0:
            print(done, dict(counts), flush=True)
        if kind == "equal" or counts[kind] > options.each:
            if result["outcome"] in FAULTS:
                print(f"seed {seed} at {np}: {kind} {_where(result)}", flush=True)
            continue
        print(f"seed {seed} at {np}: {kind}", flush=True)
        if result["outcome"] in FAULTS:
            program = shrink(program, partial(_fails, ranks[np], kind, drawing))
            last = ranks[np].run(program)
            result = last if last["outcome"] in FAULTS else result
        path = options.out / f"{seed}-{np}-{result['outcome']}.py"
        path.write_text(script(module, program, result, np))
        if "stacks" in result:
            path.with_suffix(".stacks").write_text("\n".join(result["stacks"].values()))
        print(f"seed {seed} at {np}: {kind}: {program} {_where(result)} {path}", flush=True)
    for served in ranks.values():
        served.__exit__()
    print(dict(counts))
    return int(any(kind.startswith(FAULTS) for kind in counts))


if __name__ == "__main__":
    sys.exit(main())
