"""Ranks that come: a process is started while the others continue, and becomes one of them.

It initializes MPI at once, so that the rank that has started it notices if it ends, and then runs
what the other ranks run: see hvdtrain.engines.mpi.newcomer.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import NoReturn, Self, cast

import numpy as np
from mpi4py import MPI

from hvdtrain.collective import collective
from hvdtrain.engines.communicator import Newcomer, poll_until
from hvdtrain.errors import HvdtrainError, PeerFailureError

_ENDS = 1  # tag of messages
# Ranks look for messages about the end ten times a second.
_HEARD_SECONDS = 1.0


@collective
def shrunk(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return a communicator of the ranks that are left (collective over them)."""
    made = cast("MPI.Intracomm", comm.Shrink())
    agree(comm, True)  # a rank that is still making what another one revokes would crash
    return made


@collective
def agree(comm: MPI.Comm, value: bool) -> bool:
    """Return whether a value is true on all ranks, none of which has ended; also if revoked."""
    flag = np.array([value], np.int32)
    try:
        poll_until(comm.Iagree(flag).Test)
    except MPI.Exception:  # raised on all, if one has ended
        return False
    return bool(flag[0])


class EndNotice:
    """Ends all ranks where some have joined: MPI_Abort ends only those of one MPI_COMM_WORLD."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    @classmethod
    @collective
    def of(cls, comm: MPI.Intracomm) -> Self | None:
        """Return a notice for ranks that have more than one MPI_COMM_WORLD, else None."""
        own = MPI.COMM_WORLD.Get_group()
        if MPI.UNDEFINED not in comm.Get_group().Translate_ranks(None, own):
            return None
        return cls(shrunk(comm))

    def give(self, code: int) -> None:
        """Have all other ranks end with an exit code, and wait until they have heard."""
        mark = np.array([code], np.int32)
        with suppress(MPI.Exception):
            lost = self._comm.Get_failed().Translate_ranks(None, self._comm.Get_group())
            others = set(range(self._comm.size)) - {self._comm.rank, *lost}
            requests = [self._comm.Isend(mark, rank, _ENDS) for rank in others]
            MPI.Request.Testall(requests)
        time.sleep(_HEARD_SECONDS)

    def heed(self) -> None:
        """End the ranks of this MPI_COMM_WORLD if a rank has given notice."""
        mark = np.zeros(1, np.int32)
        for rank in range(self._comm.size):
            with suppress(MPI.Exception):
                if self._comm.Iprobe(rank, _ENDS):
                    self._comm.Recv(mark, rank, _ENDS)
                    MPI.COMM_WORLD.Abort(int(mark[0]))


# Tags of messages between a newcomer and the rank that has started it.
_ENVIRON, _READY, _CALLED, _TAKEN, _MEETING = range(5)
# What a Python process needs before it can be sent the other variables.
_EARLY = ("PYTHON", "LD_LIBRARY_PATH", "OMPI_MCA_", "PATH=")
# These belong to one process or host.
_NOT_SENT = ("OMPI_", "PMIX_", "PRTE_", "HOSTNAME=", "TMPDIR=", "PWD=", "_=")
_WATCH_SECONDS = 0.2
_NEWCOMER = "hvdtrain.engines.mpi.newcomer"
# Options of Python without a value, and -m behind them in one word.
_COMBINED = re.compile(r"(-[bBdEhiIOPqRsSuvVx?]+|)-?m(.*)")


class MpiNewcomer(Newcomer):
    """A process that was started, on the rank that has started it."""

    def __init__(self, peer: MPI.Intracomm, host: str) -> None:
        self.peer, self._host = peer, host
        self._mark = np.zeros(1, np.int32)
        self._request = peer.Irecv(self._mark, 1, _READY)
        self._is_ready = False

    def ready(self) -> bool:
        try:
            self.peer.Iprobe(1, _ENVIRON)  # MPI learns of ends within calls
            self._is_ready = self._is_ready or bool(self._request.Test())
            ended = self.peer.Get_failed().size > 0
        except MPI.Exception:
            ended = True
        if ended:
            where = f" on {self._host}" if self._host else ""
            raise PeerFailureError(f"a rank that was to join{where} ended: look for its message")
        return self._is_ready


def start_rank(host: str, known: bool) -> MpiNewcomer:
    """Start a process that runs what this one does, and wait until it has MPI."""
    info = MPI.Info.Create()
    # The slots of ranks that have ended count as taken.
    info.Set("map_by", ":OVERSUBSCRIBE")
    first = os.environ.get("PWD", "")  # in which this process has begun; it may have left it
    info.Set("wdir", first if os.path.isdir(first) else os.getcwd())
    if host:
        info.Set("PMIX_HOST", host)
    if host and not known:
        info.Set("PMIX_ADD_HOST", host)
    options, program = program_words(sys.orig_argv)
    early = [f"{name}={value}" for name, value in os.environ.items()]
    words = [
        *(word for word in early if word.startswith(_EARLY)),
        *(sys.executable, *options, "-m", _NEWCOMER, *program),
    ]
    try:
        peer = MPI.COMM_SELF.Spawn("env", words, 1, info).Merge(high=False)
        peer.send(dict(os.environ), 1, _ENVIRON)
    except MPI.Exception as error:
        where = host or "this host"
        raise HvdtrainError(f"no rank can be started on {where}: {error}") from error
    return MpiNewcomer(peer, host)


def program_words(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the command line of a Python process into options, and a program with its arguments."""
    position, words = 1, list(argv)
    while position < len(words) and words[position].startswith("-") and words[position] != "-m":
        if words[position] in ("-c", "-"):
            raise HvdtrainError(
                f"ranks that run `python {words[position]}` cannot start another one: put the "
                "program into a file"
            )
        combined = _COMBINED.fullmatch(words[position])  # as -um, or -mMODULE
        if combined is not None:
            options, module = combined.groups()
            words[position : position + 1] = filter(None, (options, "-m", module))
            position += bool(options)
        else:
            position += 2 if words[position] in ("-W", "-X", "--check-hash-based-pycs") else 1
    program = words[position:]
    if program[:2] == ["-m", _NEWCOMER]:  # this process has joined itself
        program = program[2:]
    return words[1:position], program


@collective
def join_with(base: MPI.Intracomm, newcomer: MpiNewcomer | None) -> MPI.Intracomm:
    """Return a communicator of these ranks and a newcomer, which comes last, if none ends."""
    made: list[MPI.Comm] = []
    joint: MPI.Intracomm | None = None
    told = np.array([newcomer is not None], np.int32)
    peer = MPI.COMM_SELF if newcomer is None else newcomer.peer
    try:
        base.Bcast(told)
        if told[0]:
            if newcomer is not None:
                peer.Send(told, 1, _CALLED)
            made.append(base.Create_intercomm(0, peer, 1, _MEETING))
            made.append(cast("MPI.Intercomm", made[0]).Merge(high=False))
            joint = _connected(cast("MPI.Intracomm", made[1]))
    except MPI.Exception:
        joint = None
        for comm in (base, *made, *([] if newcomer is None else [peer])):
            with suppress(MPI.Exception):
                comm.Revoke()  # others may wait for this rank
    agreed = agree(base, joint is not None)
    if newcomer is not None:
        with suppress(MPI.Exception):
            newcomer.peer.Send(np.array([agreed], np.int32), 1, _TAKEN)
    return base if joint is None or not agreed else joint


def _connected(joint: MPI.Intracomm) -> MPI.Intracomm:
    # A rank that tells others of a failure connects to them, which blocks if one has ended.
    joint.Alltoall(np.zeros(joint.size, np.int8), np.empty(joint.size, np.int8))
    return joint


class _Entrance:
    """The newcomer's side, from the start of this process until it is a rank."""

    def __init__(self, peer: MPI.Intracomm) -> None:
        self._peer = peer
        self._entering = threading.Event()
        self._watch = threading.Thread(target=self._watch_starter, daemon=True)
        self._watch.start()

    def _watch_starter(self) -> None:
        """End this process if the other one has ended, as when the job is over."""
        while not self._entering.wait(_WATCH_SECONDS):
            with suppress(MPI.Exception):
                self._peer.Iprobe(0, _ENVIRON)
            if self._peer.Get_failed().size:
                _leave_unseen()

    @collective
    def enter(self) -> MPI.Intracomm:
        """Wait to be called, and return the communicator of all ranks."""
        self._entering.set()
        self._watch.join()
        try:
            mark = np.ones(1, np.int32)
            self._peer.Send(mark, 0, _READY)
            self._receive(_CALLED)
            inter = MPI.COMM_WORLD.Create_intercomm(0, self._peer, 0, _MEETING)
            joint = _connected(inter.Merge(high=True))
            if self._receive(_TAKEN):
                return joint
        except MPI.Exception:  # a rank has ended: the others continue without this one
            _leave_unseen()
        _leave_unseen()

    def _receive(self, tag: int) -> int:
        mark = np.zeros(1, np.int32)
        poll_until(self._peer.Irecv(mark, 0, tag).Test)
        return int(mark[0])


def _leave_unseen() -> NoReturn:
    os._exit(0)  # MPI_Finalize would wait for the other ranks


_entrance: _Entrance | None = None


def is_joining() -> bool:
    """Return whether this process was started by ranks, and has not joined them yet."""
    return _entrance is not None


@collective
def enter() -> MPI.Intracomm | None:
    """Join the ranks that have started this process; None if it was not by them."""
    global _entrance
    if _entrance is None:
        return None
    entrance, _entrance = _entrance, None
    return entrance.enter()


def meet_starter() -> None:
    """Meet the rank that has started this process, and take its variables."""
    global _entrance
    peer = MPI.Comm.Get_parent().Merge(high=True)
    sent: Mapping[str, str] = peer.recv(source=0, tag=_ENVIRON)
    for name, value in sent.items():
        if not f"{name}=".startswith(_NOT_SENT) or name.startswith("OMPI_MCA_"):
            os.environ[name] = value
    _entrance = _Entrance(peer)
