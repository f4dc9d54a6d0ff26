"""What launchers and schedulers say of a job that died, as far as it names the cause."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """The cause of a death, its rank and host if they are known, and the line that says it."""

    cause: str
    line: str
    rank: int | None = None
    host: str = ""
    detail: str = ""
    pid: int = 0


# Causes by what the lines of schedulers and kernels say; the first that is found tells most.
_SCHEDULER = (
    ("preempted", r"DUE TO PREEMPTION|job preempted|PREEMPTED"),
    (
        "time limit",
        r"DUE TO TIME LIMIT|walltime \S+ exceeded|TERM_RUNLIMIT|CPU time limit exceeded",
    ),
    ("out of memory", r"oom[-_ ]kill|OUT_OF_MEMORY|Out [Oo]f [Mm]emory: Killed|TERM_MEMLIMIT"),
    ("node lost", r"DUE TO NODE FAILURE|NODE_FAIL|has lost communication with a remote daemon"),
    ("cancelled", r"CANCELLED AT|TERM_OWNER|job killed by user"),
)
_SIGNALS = {
    "Killed": 9,
    "Out Of Memory": 9,
    "Terminated": 15,
    "Segmentation fault": 11,
    "Bus error": 7,
    "Aborted": 6,
}
# What a launcher says of the first process that ended badly. Open MPI breaks its lines.
_LAUNCHER = (
    r"process rank (?P<rank>\d+) with PID \d+ on node (?P<host>\S+) exited on\s+"
    r"signal (?P<signal>\d+)",
    r"Process name: \S*,(?P<rank>\d+)\]\s+Exit code: +(?P<code>\d+)",
    r"(?:srun|slurmstepd): error: (?P<host>[\w.-]+): tasks? (?:(?P<rank>\d+)|[\d,-]+): "
    rf"(?:Exited with exit code (?P<code>\d+)|(?P<word>{'|'.join(_SIGNALS)}))",
    r"hvdtrain: rank (?P<rank>\d+) ended the job with exit code (?P<code>\d+)",
    # Of MPICH, which may name a process that it has ended itself.
    r"PID \d+ RUNNING AT (?P<host>\S+)\s+=\s+EXIT CODE: (?P<code>\d+)"
    r"(?:(?=(?s:.*)EXIT STRING: [^\n]*\(signal (?P<signal>\d+)\))|)",
)
# What Open MPI, MPICH and srun put before lines if they are asked to.
_PREFIX = re.compile(r"^(?:(?:\[[^]\n]*\])+<std\w+>: ?|\[\d+\] | *\d+: )", re.MULTILINE)
_ERROR = re.compile(
    r"^(?:\[rank (?P<rank>\d+)/\d+\] )?"
    r"(?P<text>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)(?:: .*)?)$",
    re.MULTILINE,
)
_FOLLOWS = re.compile(r"(?:PeerFailure|ConnectionLost|RanksLost)Error")


def read_told(text: str) -> list[Told]:
    """Return what a job's output says of its end, the most telling first."""
    found, text = [], _PREFIX.sub("", text)
    for cause, pattern in _SCHEDULER:
        if hit := re.search(rf"^.*(?:{pattern}).*$", text, re.MULTILINE):
            killed = re.search(r"Killed process (\d+)", hit[0])
            pid = int(killed[1]) if killed else 0
            found.append(Told(cause, hit[0].strip(), pid=pid))
    for error in _ERROR.finditer(text):
        if not _FOLLOWS.match(error["text"].rpartition(".")[2] or error["text"]):
            rank = None if error["rank"] is None else int(error["rank"])
            found.append(Told("error", error[0], rank, detail=error["text"]))
            break
    hits = (re.search(pattern, text) for pattern in _LAUNCHER)
    return found + [_launcher(hit) for hit in hits if hit is not None]


def _launcher(hit: re.Match[str]) -> Told:
    parts = hit.groupdict()
    rank = None if parts.get("rank") is None else int(parts["rank"])
    number = parts.get("signal") or _SIGNALS.get(parts.get("word") or "", 0)
    code = int(parts.get("code") or 0)
    if code > 128:
        number = code - 128
    cause, detail = ("signal", number) if number else ("exit code", code)
    line, host = " ".join(hit[0].split()), parts.get("host") or ""
    return Told(cause, line, rank, host, str(detail))
