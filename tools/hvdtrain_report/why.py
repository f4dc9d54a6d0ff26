"""Names the first failure of a job from its flight records and from what was printed."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from hvdtrain.topology import format_ranks, shortened
from hvdtrain_report.flight import Note, Rank
from hvdtrain_report.told import Told

# Causes of errors by their texts.
_ERRORS = (
    ("disk full", r"Errno (?:27|28|122)\b|No space left|Disk quota|File too large"),
    ("not finite", r"NotFiniteError|not finite"),
    ("loader", r"DataLoader worker"),
    ("out of memory", r"MemoryError|[Oo]ut of memory|bad_alloc"),
    ("different requests", r"MismatchError"),
    ("import", r"ModuleNotFoundError|ImportError"),
    ("interrupted", r"KeyboardInterrupt"),
)
ADVICE = {
    "killed": "look for 'Out of memory' in the kernel's log of that host; who else sends SIGKILL?",
    "out of memory": "ask for more memory, or use fewer ranks per host, workers or samples a batch",
    "time limit": "ask for more time, or go on where it was saved: train --resume auto",
    "preempted": "go on where it was saved: train --resume auto, requeued by the scheduler",
    "cancelled": "nothing is wrong in the job: go on where it was saved with train --resume auto",
    "terminated": "ask who sent it: a scheduler, timeout or a user; go on with train --resume auto",
    "node lost": "start again without that host; with run --elastic the others go on",
    "disk full": "make room there, or write elsewhere (train --out, --keep-checkpoints)",
    "not finite": "lower the learning rate, or train --clip-norm or --non-finite skip",
    "loader": "more memory or shared memory (df /dev/shm) for the loading processes, or fewer",
    "different requests": "submit the same on every rank: hvdtrain lint finds branches on rank()",
    "import": "install it on that host: ranks may have different environments",
    "interrupted": "somebody pressed Ctrl-C: go on where it was saved with train --resume auto",
    "stall": "see what it does there; HVDTRAIN_STALL_STACKS=1 shows the stacks of all ranks",
    "left": "let all ranks run the same number of steps: hvdtrain lint finds early exits",
    "exit code": "look for os._exit, or a library or shell script around that rank that exits",
    "segfault": "the line calls the C code that failed: try another version, or one rank alone",
    "error": "correct that line; what other ranks say follows from it",
    "unknown": "keep what the job prints, and name it with --output",
}
# These a scheduler does from outside; the ranks know nothing of them.
_OUTSIDE = ("preempted", "time limit", "out of memory", "node lost", "cancelled")


@dataclass(frozen=True)
class Verdict:
    """The first failure; `ranks` is empty if it is that of the job or is not known."""

    cause: str
    what: str
    ranks: tuple[int, ...] = ()
    host: str = ""
    at: float = 0.0
    evidence: str = ""


def judge(ranks: Sequence[Rank], printed: Sequence[Told] | None) -> Verdict:
    """Return the first failure, as far as the evidence says, and `printed` if it is known."""
    by_pid = {rank.pid: rank.rank for rank in ranks}
    told = [replace(t, rank=by_pid.get(t.pid, t.rank)) for t in printed or ()]
    found = _recorded(ranks, None if printed is None else told) if ranks else None
    outside = next((t for t in told if t.cause in _OUTSIDE), None)
    launcher = next((t for t in told if t.cause in ("signal", "exit code")), None)
    error = next((t for t in told if t.cause == "error"), None)
    if found is None or found.cause in ("killed", "terminated", "unknown"):
        if outside is not None:
            return _of_outside(outside, found, launcher)
        if found is None and error is not None:
            rank = launcher if error.rank is None else error
            named = () if rank is None or rank.rank is None else (rank.rank,)
            return Verdict(_cause(error.detail), error.detail, named, evidence=error.line)
        if launcher is not None:
            return _of_launcher(launcher, found, ranks)
    return found or Verdict("unknown", "nothing here says why it ended")


def _cause(text: str) -> str:
    return next((cause for cause, pattern in _ERRORS if re.search(pattern, text)), "error")


def _of_outside(told: Told, found: Verdict | None, launcher: Told | None) -> Verdict:
    own = told.cause in ("out of memory", "node lost")  # which end one rank or host first
    if not own:
        at = found.at if found else 0.0
        return Verdict(told.cause, f"the job was ended ({told.cause})", at=at, evidence=told.line)
    named = found or Verdict("unknown", "")
    rank = told.rank if told.rank is not None or launcher is None else launcher.rank
    if rank is not None and not named.ranks:
        named = replace(named, ranks=(rank,), host=launcher.host if launcher else "")
    return replace(named, cause=told.cause, what=told.cause, evidence=told.line)


def _of_launcher(told: Told, found: Verdict | None, ranks: Sequence[Rank]) -> Verdict:
    """Return a verdict about a rank that left no word, by what its launcher says."""
    known = found is not None and found.cause != "unknown"
    if found is not None and known and told.rank not in (None, *found.ranks):
        return found
    named = (told.rank,) if told.rank is not None else found.ranks if found else ()
    at = max((rank.last_sign for rank in ranks if rank.rank in named), default=0.0)
    host = told.host or next((rank.host for rank in ranks if rank.rank in named), "")
    if told.cause == "exit code":
        what = f"ended with exit code {told.detail}, without an error"
        return Verdict("exit code", what, named, host, at, told.line)
    if found is not None and found.cause == "terminated":
        return replace(found, evidence=told.line)
    cause = {"11": "segfault", "7": "segfault", "15": "terminated"}.get(told.detail, "killed")
    name = "see kill -l"
    with suppress(ValueError):
        name = signal.Signals(int(told.detail)).name
    what = f"killed by signal {told.detail} ({name})"
    if cause == "killed" and found is not None and found.cause == "out of memory":
        cause = found.cause
    return Verdict(cause, what, named, host, at, told.line)


def _recorded(ranks: Sequence[Rank], told: Sequence[Told] | None) -> Verdict | None:
    notes = sorted(
        ((note, rank) for rank in ranks for note in rank.notes), key=lambda pair: pair[0].time
    )
    ends = [pair for pair in notes if pair[0].kind in ("error", "signal", "follows")]
    if (stalled := _stall(notes, ranks, ends)) is not None:
        return stalled
    silent = [r for r in ranks if not r.runs and all(n.kind == "stall" for n in r.notes)]
    faults = [rank for rank in silent if rank.fault]
    if faults:
        rank = min(faults, key=lambda rank: rank.last_sign)
        lines = [line.strip() for line in rank.fault.splitlines()]
        place = next((line for line in lines if line.startswith("File ")), "")
        return _about(rank, "segfault", f"{lines[0]} in {place}", rank.last_sign, "faulthandler")
    gone = [rank for rank in silent if ends and rank.rank in ends[0][0].ended]
    own = [(note, rank) for note, rank in ends if note.kind != "follows" and not note.ended]
    if own and not gone:
        return _own_words(own, told)
    left = [(n, r) for n, r in notes if n.kind == "left" and ends and n.time <= ends[0][0].time]
    if left and not gone:
        note, rank = left[0]
        what = "its program ended (without an error) while others waited for it"
        return _about(rank, "left", what, note.time, ends[0][0].text)
    suspects = gone or silent
    if suspects and len({rank.host for rank in suspects}) == 1 and len(suspects) < len(ranks):
        return _without_word(suspects, ends)
    late = [rank for rank in silent if rank.pending is None]
    if 0 < len(late) < len(silent) == len(ranks):
        found = _without_word(late, [])
        return replace(found, what=f"{found.what}, and the others waited for it")
    at = max(rank.last_sign for rank in ranks)
    return Verdict("unknown", "ranks ended without a word, as killed ranks do", at=at)


def _without_word(suspects: Sequence[Rank], ends: Sequence[tuple[Note, Rank]]) -> Verdict:
    """Return a verdict about ranks of one host, by what the first of the others noted."""
    host = suspects[0].host
    at = min(rank.last_sign for rank in suspects)
    cause, evidence = "killed", ""
    if ends:
        note, other = ends[0]
        evidence = f"rank {other.rank} noted then: {note.text}"
        if note.oom_kills > other.oom_kills and other.host == host:
            cause = "out of memory"
            evidence = f"the kernel of {host} ended a process for lack of memory meanwhile"
    ranks = tuple(rank.rank for rank in suspects)
    return Verdict(cause, "it ended without a word, as killed ranks do", ranks, host, at, evidence)


def _about(rank: Rank, cause: str, what: str, at: float, evidence: str) -> Verdict:
    return Verdict(cause, what, (rank.rank,), rank.host, at, evidence)


def _own_words(own: Sequence[tuple[Note, Rank]], told: Sequence[Told] | None) -> Verdict:
    """Return a verdict about ranks that noted errors or signals before any had ended."""
    note, rank = own[0]
    if note.kind == "error":
        plain = _plain(note.text)
        same = sorted(r.rank for n, r in own if n.kind == "error" and _plain(n.text) == plain)
        cause = _cause(note.text)
        if cause == "different requests":
            same = _minority(note.text) or same
        return Verdict(cause, note.text, tuple(same), rank.host, note.time)
    # A launcher that has ended all ranks itself blames none; else the first one may be dead before
    # another one has noted its signal.
    blamed = told is not None and any((t.cause, t.rank) == ("signal", rank.rank) for t in told)
    if not blamed and (told is not None or len(own) > 1):
        return Verdict("terminated", f"told to end from outside ({note.text})", at=note.time)
    return _about(rank, "terminated", f"told to end from outside ({note.text})", note.time, "")


def _plain(error: str) -> str:
    return re.sub(r"\[rank \d+/\d+\]", "", error)


# By ranks as in "ranks 0, 2-8, and 9 more up to 31".
_SENT = re.compile(r"ranks? ([\d, -]+?)(?:, and (\d+) more up to \d+)? sent ")


def _minority(text: str) -> list[int]:
    """Return the ranks that sent what the fewest have sent; empty if it is not clear."""
    groups = []
    for listed, more in _SENT.findall(text):
        spans = [[int(rank) for rank in span.split("-")] for span in listed.split(", ")]
        ranks = [rank for span in spans for rank in range(span[0], span[-1] + 1)]
        groups.append((len(ranks) + int(more or 0), [] if more else ranks))
    groups.sort()
    return groups[0][1] if len(groups) > 1 and groups[0][0] < groups[1][0] else []


def _stall(
    notes: Sequence[tuple[Note, Rank]],
    ranks: Sequence[Rank],
    ends: Sequence[tuple[Note, Rank]],
) -> Verdict | None:
    """Return a verdict about a stall that did not end, unless the missing rank failed after it."""
    last = max((rank.done.ended for rank in ranks if rank.done), default=0.0)
    for note, _ in notes:
        late = re.search(r"waits? for ranks? (\d+)", note.text)
        if note.kind != "stall" or late is None or last > note.time:
            continue
        missing = next((rank for rank in ranks if rank.rank == int(late[1])), None)
        if missing is None:
            return Verdict("stall", note.text, (int(late[1]),), at=note.time)
        # Of those who see a stall, many press Ctrl-C.
        errors = [_cause(n.text) for n in missing.notes if n.kind == "error"]
        failed = missing.fault or any(cause != "interrupted" for cause in errors)
        if failed or any(
            missing.rank in n.ended and n.oom_kills > r.oom_kills for n, r in ends[:1]
        ):
            continue
        where = next((n.where for n in missing.notes if n.kind == "stall" and n.where), "")
        what = f"it did not submit the operation: {note.text}"
        if where:
            what += f"; it was in {where}"
        at = missing.done.ended if missing.done else missing.last_sign
        return _about(missing, "stall", what, at, "")
    return None


def explain(verdict: Verdict, ranks: Sequence[Rank]) -> Iterator[str]:
    """Yield at most five lines."""
    who = format_ranks(verdict.ranks) if verdict.ranks else "the job"
    on = f" on {verdict.host}" if verdict.host and len(verdict.ranks) == 1 else ""
    at = ""
    if verdict.at:
        moment = datetime.fromtimestamp(verdict.at).astimezone()
        at = f" at {moment.isoformat(' ', 'milliseconds')}"
    fault = f"{who}{on} failed first{at}"
    if verdict.cause == "stall" and ranks and all(rank.may_run for rank in ranks):
        fault = f"the job is waiting for {who}{on}{at.replace('at', 'since', 1)}"
    yield f"{fault}: {_shortened(verdict.what)}"
    own = [rank for rank in ranks if rank.rank in verdict.ranks]
    others = [rank for rank in ranks if rank.rank not in verdict.ranks]
    for title, group in (("it was", own), ("the others" if own else "the ranks", others)):
        if group:
            yield f"  {title}: {_places(group)}"
    if verdict.evidence:
        yield f"  evidence: {_shortened(verdict.evidence)}"
    yield f"  try: {ADVICE[verdict.cause]}"


def _shortened(text: str, most: int = 400) -> str:
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most // 2]} … {line[-most // 2 :]}"


def _places(ranks: Sequence[Rank]) -> str:
    """Return how far ranks were, with those together that were equally far."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(_place(rank), []).append(rank.rank)
    texts = [f"{format_ranks(those)} {place}" for place, those in groups.items()]
    return shortened(texts, "; ", " places")


def _place(rank: Rank) -> str:
    done, pending = rank.done, rank.pending
    steps = f", {rank.steps} optimizer steps done" if rank.steps else ""
    if pending is not None:
        before = done.number if done is not None and done.channel == pending.channel else 0
        return f"in {pending.subject} (operation {pending.number or before + 1}){steps}"
    if done is None:
        return "before the first operation"
    return f"after {done.subject} (operation {done.number}){steps}"
