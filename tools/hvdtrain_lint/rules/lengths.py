"""Loops that end on one rank before they end on another."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.collective import averages_by_hvd, collective
from hvdtrain_lint.source.data import is_every_nth
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import last_name

_WRAPPERS = {"enumerate", "tqdm", "iter", "list", "zip"}
# They make loops of different lengths end together, or equal.
_JOINING = {"join", "Join", "joinable"}
_EQUALIZING = {"repeat", "take", "cycle"}


def _unequal(script: Script) -> Iterator[Found]:
    if script.words & _JOINING:
        return
    for node in script.tree.nodes:
        if not isinstance(node, ast.For) or not script.calls.runs_on_ranks(node):
            continue
        how = next(
            (h for each in _iterated(script, node.iter) if (h := _strided(script, each))), ""
        )
        if how and _waits(script, node):
            yield Found(node.iter, f"the loop runs over every size()-th {how}")


def _iterated(script: Script, node: ast.expr) -> list[ast.expr]:
    while isinstance(node, ast.Call) and last_name(node) in _WRAPPERS and node.args:
        node = node.args[0]
    return script.values.origins(node)


def _strided(script: Script, node: ast.expr) -> str:
    """Return what a rank's part consists of if others may have one more; else ""."""
    if is_every_nth(script, node):
        return "element of a sequence"
    links = []
    while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        links.append(node)
        origins = script.values.origins(node.func.value)
        node = origins[0] if len(origins) == 1 else node.func.value
    if any(last_name(link) in _EQUALIZING for link in links):
        return ""
    shards = [link for link in links if last_name(link) == "shard" and len(link.args) == 2]
    by_rank = any(
        script.ranks.is_rank(s.args[1]) and script.ranks.is_size(s.args[0]) for s in shards
    )
    return "sample of a data set" if by_rank else ""


def _waits(script: Script, loop: ast.For) -> bool:
    calls = [each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Call)]
    if any(collective(script, call) for call in calls):
        return True
    steps = any(last_name(call) in ("backward", "apply_gradients") for call in calls)
    return steps and (averages_by_hvd(script) or "DistributedDataParallel" in _wrapped(script))


def _wrapped(script: Script) -> set[str]:
    return {script.names.last(call) for call in script.tree.calls}


RULES = (
    Rule(
        "HVD105",
        "a loop with collective operations that may be longer on some ranks",
        "some ranks take one step more than others, and wait in it for ever",
        "give all ranks equally many (cut the rest off, or repeat and count steps), or use join()",
        _unequal,
    ),
)
