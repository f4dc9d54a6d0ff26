"""Collective calls that not every rank makes."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.collective import collective, collectives_of
from hvdtrain_lint.source.guards import Branch
from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import last_name

_CALLBACKS = (
    *("BroadcastGlobalVariablesCallback", "BroadcastGlobalVariablesHook", "MetricAverageCallback"),
)


def _under_condition(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        written = collective(script, call)
        inside = None if written else _collective_inside(script, call)
        if not written and not inside:
            continue
        branch = script.guards.sure(call)
        if branch is None or _others_join(script, call, branch, inside or last_name(call)):
            continue
        line = branch.holder.lineno
        if written:
            yield Found(call, f"{written} runs on some ranks only (condition in line {line})")
        else:
            yield Found(
                call,
                f"{last_name(call)}(), which calls {inside}(), runs on some ranks only "
                f"(condition in line {line})",
            )


def _callback(script: Script) -> Iterator[Found]:
    for call in script.named(*_CALLBACKS):
        branch = script.guards.sure(call)
        if branch is not None and (script.names.full(call) or "").startswith(HVD):
            line = branch.holder.lineno
            yield Found(call, f"{last_name(call)} is on some ranks only (condition in line {line})")


def _after_exit(script: Script) -> Iterator[Found]:
    for call in script.tree.calls:
        written = collective(script, call)
        left = script.guards.exits(call) if written else None
        if left is None or script.guards.sure(call) is not None:
            continue
        before_leaving = [node for node in ast.walk(left) if isinstance(node, ast.Call)]
        own = {function.name for function in script.tree.functions}
        if any(collective(script, each) or last_name(each) in own for each in before_leaving):
            continue
        yield Found(call, f"{written} is not reached by ranks that leave in line {left.lineno}")


def _collective_inside(script: Script, call: ast.Call) -> str | None:
    """Return the collective that a called function of the script makes in any case."""
    called = script.methods.called(call)
    if len(called) != 1:
        return None
    found = collectives_of(script, called[0])
    inside = next((each for each in found if script.guards.sure(each) is None), None)
    return last_name(inside) if inside is not None else None


def _others_join(script: Script, call: ast.Call, branch: Branch, name: str) -> bool:
    """Return whether other ranks make a call of this name elsewhere, under a condition too."""
    scope = script.tree.scope(call)
    for other in script.tree.calls:
        if other is call or script.tree.scope(other) is not scope:
            continue
        makes = last_name(other) == name or _collective_inside(script, other) == name
        elsewhere = script.guards.sure(other) if makes else None
        if elsewhere is not None and elsewhere != branch:
            return True
    return False


RULES = (
    Rule(
        "HVD101",
        "a collective operation under a condition on the rank",
        "the others never call it, so it waits for ever",
        "call it on all ranks, and put only what one rank does with the result under the condition",
        _under_condition,
    ),
    Rule(
        "HVD102",
        "a collective operation after some ranks have returned",
        "the ranks that reach it wait for ever",
        "let all ranks reach it, and put what one rank does alone under a condition",
        _after_exit,
    ),
    Rule(
        "HVD106",
        "a callback or hook that communicates, under a condition on the rank",
        "it waits for the ranks that do not have it",
        "give it to all ranks; only callbacks that write belong under the condition",
        _callback,
    ),
)
