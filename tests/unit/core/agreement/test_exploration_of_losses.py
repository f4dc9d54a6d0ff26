"""Ranks die in every order of events: those that are left go on, and nothing hangs or is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
from explorer import explore
from model_losses import LossModel, Processes
from model_process import Process, Stage
from model_rank import Rank

from hvdtrain.core.agreement.events import Action, ChannelState, Event, Failed, Phase, Voted
from hvdtrain.core.agreement.lifecycle import transition

# Programs that fit each other: none waits for what another one never submits.
PAIRS = [
    ("leave close", "leave close"),
    ("a leave close", "a a? leave close"),
    ("a a? b b? leave close", "a b b? a? leave close"),
    ("a b leave close", "b a a? leave close"),
    ("a a~? leave close", "a~ a? leave close"),
    ("G G? leave close", "G leave close"),
    ("a a? join leave close", "join leave close"),
    ("a join b b? leave close", "join b leave close"),
    ("joining a leave close", "a join leave close"),
    ("s( s) s? leave close", "s( s+ leave close"),
    ("s( a s) a? s? leave close", "a s( s) s? a? leave close"),
    ("listen a a? leave close", "a a? deaf leave close"),
]
# Worlds that change without a death, as for a rank that leaves or joins; and deaths meanwhile.
ASKED = [
    ("a recover | a a? leave close", "recover | a a? leave close"),
    ("s( recover | s( s) s? leave close", "s( s) recover | s( leave close"),
    ("join recover | leave close", "recover | leave close"),
]
TRIPLES = [
    ("leave close",) * 3,
    ("a a? leave close",) * 3,
    ("a leave close", "a a? leave close", "join leave close"),
    ("a recover | a a? leave close", "recover | a leave close", "recover | a a? leave close"),
]
