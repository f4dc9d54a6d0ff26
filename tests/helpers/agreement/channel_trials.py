"""Random trials of the channel: each is a program that is played on all ranks, and judged."""

from __future__ import annotations

import random
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress

from channel_judge import judge
from channel_player import Player
from channel_program import Program
from channel_random import make_program
from channel_record import Fault
from meeting_engine import PROGRAM, EngineFault
from meeting_group import Group, Referee

# How long a trial may take, of milliseconds, before it counts as one that hangs.
HANG_SECONDS = 120.0


def sound_trial(seed: int) -> list[str]:
    """Return what is wrong in a trial in which nothing fails."""
    return _try(make_program(seed), None)


def faulty_trial(seed: int) -> list[str]:
    """Return what is wrong in a trial in which a rank ends early or its engine fails."""
    program = make_program(seed)
    return _try(program, _make_fault(program))


def _make_fault(program: Program) -> Fault:
    chance = random.Random(-1 - program.seed)
    rank = chance.randrange(program.size)
    kind = chance.choice(("fails", "dies", "interrupted", "leaves", "closes"))
    if kind in ("leaves", "closes"):
        return Fault(rank, stops=chance.choice(_places(program, rank)), closes=kind == "closes")
    call = chance.randrange(chance.choice((4, 10, 30)))
    arrives = chance.random() < 0.3
    engine = EngineFault(call, arrives, dies=kind == "dies", interrupted=kind == "interrupted")
    return Fault(rank, engine, closes=chance.random() < 0.5)


def _places(program: Program, rank: int) -> list[int]:
    """Return where a program may end early: before it leaves, and not while it has joined."""
    places, joined = [], False
    for number, act in enumerate(program.acts[rank]):
        if not joined:
            places.append(number)
        if act.kind == "leave":
            break
        joined = (joined or act.kind == "join") and act.kind != "finish"
    return places


def _try(program: Program, fault: Fault | None) -> list[str]:
    referee = Referee(lenient=fault is not None)
    group = Group(referee, program.size, "trial")
    before = set(threading.enumerate())
    players = [Player(program, rank, group, fault) for rank in range(program.size)]
    deadline = time.monotonic() + HANG_SECONDS
    programs = [
        threading.Thread(target=player.run, name=PROGRAM, daemon=True) for player in players
    ]
    for thread in programs:
        thread.start()
    hung = _hung(programs, deadline, referee, "a program hangs")
    if hung:
        for player in players:
            player.break_off()
    others = [thread for thread in threading.enumerate() if thread not in before]
    _hung(others, deadline, referee, "a thread is left")
    referee.check_released()
    records = [player.record for player in players]
    lines = referee.faults + judge(program, records, fault)
    return [f"seed {program.seed} ({fault or 'no fault'}): {line}" for line in lines]


def _hung(
    threads: Sequence[threading.Thread], deadline: float, referee: Referee, fault: str
) -> bool:
    """Wait for threads; note a fault and return True if one does not end."""
    for thread in threads:
        with suppress(RuntimeError):  # a program that hangs may be about to start another one
            thread.join(max(0.0, deadline - time.monotonic()))
    frames = sys._current_frames()
    found = [frames.get(thread.ident or 0) for thread in threads if thread.is_alive()]
    if found:
        stacks = ["".join(traceback.format_stack(frame)[-5:]) for frame in found if frame]
        referee.blame_aloud(f"{fault}:\n" + "\n".join(stacks))
    return bool(found)
