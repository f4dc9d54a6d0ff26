"""Kill ranks of `run --elastic` at moments that a seed draws, and check how each run ends.

    python tests/helpers/training/kill_sweep.py 200           # until 200 were killed: an hour
    python tests/helpers/training/kill_sweep.py 1 --seed 17   # one run again

It needs the folders under tests/helpers on PYTHONPATH, as pytest has them. It prints a line about
each run.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hosts import AGENT, require_hosts, write_hostfile
from job import Job
from paths import ROOT
from ranks import start
from run_files import summary_of
from segments import no_new_segments

RECIPE = ROOT / "tests" / "failure" / "killed_recipe.py"
SAMPLES, BATCH, EPOCHS = 100, 12, 12
OPTIONS = (
    f"--global-batch-size {BATCH} --epochs {EPOCHS} --lr 0.01 --lr-scaling none --device cpu "
    "--checkpoint-every 1step"
)
# Of runs that nobody interrupts, with 1 to 4 ranks, which add in different orders.
LOSS = 0.63062
_LIMIT_SECONDS = 600.0


@dataclass(frozen=True)
class Outcome:
    kills: int
    restarts: int
    loss: float
    seconds: float


def inside(moment: str, highest: int) -> Callable[[random.Random, int], str]:
    return lambda draw, ranks: f"{draw.randrange(ranks)}:{draw.randint(1, highest)}:{moment}"


def two_at_once(draw: random.Random, ranks: int) -> str:
    number = draw.randint(1, 30)
    first, second = draw.sample(range(ranks), 2)
    return f"{first}:{number}:forward {second}:{number}:forward"


def during_recovery(draw: random.Random, ranks: int) -> str:
    first, second = draw.sample(range(ranks), 2)
    return f"{first}:{draw.randint(1, 30)}:forward {second}:1:recipe2"


def connections_closed(draw: random.Random, ranks: int) -> str:
    """Return what draws ranks that lose their connections to other hosts."""
    number = draw.randint(1, 60)
    cut = draw.sample(range(ranks), draw.randint(1, 2))
    return " ".join(f"{rank}:{number}:forward:cut" for rank in cut)


# Ranks kill themselves at these moments, or are killed from outside as `_from_outside` says.
KINDS: Mapping[str, Callable[[random.Random, int], str] | None] = {
    "bucket": inside("backward", 60),
    "reduced": inside("before_update", 60),
    "updated": inside("update", 60),
    "checkpoint": lambda draw, ranks: f"0:{draw.randint(1, 30)}:checkpoint",
    "rank 0": lambda draw, ranks: f"0:{draw.randint(1, 60)}:forward",
    "two at once": two_at_once,
    "during a recovery": during_recovery,
    "at any time": None,
    "soon after another": None,
    "first 0.5 s": None,
    "ranks of a host": None,
    "host with daemon": None,
    "connections closed": connections_closed,
}
# On stand-in hosts; others are there at times.
ON_HOSTS = ("ranks of a host", "host with daemon", "connections closed")


def sweep_case(kind: str, seed: int, folder: Path) -> Outcome:
    draw, inner = random.Random(f"{kind} {seed}"), KINDS[kind]
    on_hosts = kind in ON_HOSTS or draw.random() < 0.3
    if on_hosts:
        require_hosts()
    slots = draw.choice(([1, 1, 1], [2, 1, 1], [1, 1, 2])) if on_hosts else []
    ranks = sum(slots) if on_hosts else draw.randint(3 if " " in kind else 2, 4)
    out, ledger = folder / "out", folder / "ledger"
    words = [sys.executable, "-m", "hvdtrain", "run", "--elastic", "-np", ranks]
    env: dict[str, Any] = {"HVDTRAIN_LEDGER": ledger, "KILLS": inner(draw, ranks) if inner else ""}
    if on_hosts:
        words += ["-hostfile", write_hostfile(folder / "hosts", "openmpi", slots), "-x", "KILLS"]
        env["PRTE_MCA_plm_ssh_agent"] = AGENT
    words += ["--", "train", RECIPE, "--out", out, *OPTIONS.split()]
    with no_new_segments(), start(words, env=env) as job:
        kills = len(env["KILLS"].split()) or _from_outside(kind, draw, job, ranks, out)
        done = job.ended(_LIMIT_SECONDS, code=0)
    restarts = done.stderr.count(": starting again")
    summary = summary_of(out)
    _check(summary, ledger)
    # Of ranks that take one another for dead, either side may go on.
    if inner is not None and kind != "connections closed" and not restarts:
        assert sum(len(failure["lost"]) for failure in summary["failures"]) == kills, summary
    return Outcome(kills, restarts, summary["final"]["loss"], done.seconds)


def _check(summary: Mapping[str, Any], ledger: Path) -> None:
    assert len(set(summary["weights_sha256"])) == 1, summary
    assert summary["samples"] == EPOCHS * SAMPLES, summary
    ledger_is_exact(ledger)


def _from_outside(kind: str, draw: random.Random, job: Job, ranks: int, out: Path) -> int:
    """Kill ranks of a job at a moment of which they do not know; return how many."""
    if kind == "first 0.5 s":
        pids = job.rank_pids(draw.randint(1, ranks))
        time.sleep(draw.uniform(0, 0.5))
        return _kill([draw.choice(list(pids.values()))])
    pids = job.rank_pids(ranks)
    deadline = time.monotonic() + _LIMIT_SECONDS / 2
    while not any(out.glob("*")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 2))
    if kind == "at any time":
        return _kill([draw.choice(list(pids.values()))])
    if kind == "soon after another":
        first, second = draw.sample(list(pids.values()), 2)
        sent = _kill([first])
        time.sleep(draw.uniform(0, 0.15))
        return sent + _kill([second])
    by_host: dict[str, list[int]] = {}
    for pid in pids.values():
        with suppress(OSError):
            by_host.setdefault(os.readlink(f"/proc/{pid}/ns/uts"), []).append(pid)
    victims = by_host[draw.choice(sorted(by_host))] if by_host else []  # it may have ended
    if kind == "host with daemon" and victims:
        with suppress(OSError, StopIteration):  # it may have ended in the meantime
            return end_host(victims[0], draw.random() < 0.5) and len(victims)
        return 0
    return _kill(victims)


def end_host(pid: int, answers: bool) -> int:
    """End all processes of a stand-in host; return how many were killed by this (1 or 0)."""
    environ = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    folder = next(word for word in environ if word.startswith("TMPDIR="))
    if not answers:  # see agent.sh
        Path(folder.removeprefix("TMPDIR=")).with_suffix(".down").touch()
    return _kill([_first_of_host(pid)])


def _first_of_host(pid: int) -> int:
    while True:
        text = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
        if fields["NSpid"].split()[-1] == "1":
            return pid
        pid = int(fields["PPid"])


def _kill(pids: list[int]) -> int:
    killed = 0
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed += 1
    return killed


def ledger_is_exact(ledger: Path) -> None:
    """Check that steps before that with which the next world goes on have used each sample once."""
    worlds: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for path in ledger.parent.glob(f"{ledger.name}.*"):
        for line in map(json.loads, path.read_text().splitlines()):
            worlds.setdefault((line["start"], -line["ranks"]), []).append(line)
    used: dict[int, Counter[int]] = {}
    end = float("inf")
    for _, lines in sorted(worlds.items(), reverse=True):
        for line in lines:
            if _position(line) < end:
                used.setdefault(line["epoch"], Counter()).update(line["samples"])
        end = min([end, *map(_position, lines)])
    assert sorted(used) == list(range(EPOCHS)), sorted(used)
    for epoch, samples in used.items():
        assert samples == Counter(range(SAMPLES)), (epoch, samples)


def _position(line: Mapping[str, Any]) -> int:
    return int(line["epoch"] * SAMPLES + line["done"])


def main() -> None:
    """Run cases until enough SIGKILLs were sent, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kills", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append")
    asked = parser.parse_args()
    os.environ.setdefault("HVDTRAIN_TEST_SESSION", "kill-sweep")
    kinds = asked.kind or list(KINDS)
    sent, failed, seed, losses = 0, 0, asked.seed, []
    while sent < asked.kills:
        kind = kinds[seed % len(kinds)]
        try:
            with tempfile.TemporaryDirectory(prefix="kill-sweep-") as folder:
                outcome = sweep_case(kind, seed, Path(folder))
            losses.append(outcome.loss)
            sent += max(outcome.kills, 1)
            text = f"{outcome}"
        except AssertionError as error:
            failed, sent = failed + 1, sent + 1
            text = f"FAILED: {error}"
        print(f"{seed} {kind}: {text}", flush=True)
        seed += 1
    spread = sorted(losses)[:: max(len(losses) - 1, 1)]
    print(f"{sent} kills, {seed - asked.seed} runs, {failed} failed; losses {spread}", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
