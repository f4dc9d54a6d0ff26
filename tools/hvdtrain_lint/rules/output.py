"""Lines and progress bars that every rank prints."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import Scope, last_name, path_of, words_in

_OWN_LINE = re.compile(r"rank|gpu|worker|host|pid|device|process|node", re.IGNORECASE)
_OWN_TEXT = re.compile(r"rank|gpu|worker|process|node", re.IGNORECASE)
_VERBOSE_POSITION = 4


def _printed(script: Script) -> Iterator[Found]:
    if _replaces_print(script):
        return
    seen: set[Scope] = set()
    for call in script.everywhere([c for c in script.tree.calls if path_of(c.func) == "print"]):
        scope = script.tree.scope(call)
        if (
            scope in seen
            or not _repeats(script, call, frozenset())
            or _names_its_rank(script, call)
        ):
            continue
        seen.add(scope)
        yield Found(call, "print() in a loop runs on all ranks")


def _replaces_print(script: Script) -> bool:
    """Return whether print is another function here, as where only rank 0's is left."""
    if any(function.name == "print" for function in script.tree.functions):
        return True
    return any(
        isinstance(node, (ast.Name, ast.Attribute))
        and isinstance(node.ctx, ast.Store)
        and last_name(node) in ("print", "stdout")
        for node in script.tree.nodes
    )


def _repeats(script: Script, node: ast.AST, seen: frozenset[Scope]) -> bool:
    if script.tree.loops(node):
        return True
    scope = script.tree.scope(node)
    if isinstance(scope, ast.Module) or scope in seen:
        return False
    sites = script.calls.sites(scope)
    return any(_repeats(script, site, seen | {scope}) for site in sites)


def _names_its_rank(script: Script, call: ast.Call) -> bool:
    if keyword(call, "file") is not None:
        return True
    if any(script.ranks.mentions_rank(each) for each in call.args):
        return True
    if any(_OWN_LINE.search(word) for each in call.args for word in words_in(each)):
        return True
    return any(
        isinstance(each, ast.Constant)
        and isinstance(each.value, str)
        and _OWN_TEXT.search(each.value)
        for argument in call.args
        for each in ast.walk(argument)
    )


def _bars(script: Script) -> Iterator[Found]:
    for call in script.everywhere(script.named("tqdm", "trange")):
        own = {each.arg for each in call.keywords} & {"disable", "position", "file", None}
        of_tqdm = (script.names.full(call) or "").startswith("tqdm")
        named = any(script.ranks.mentions_rank(each.value) for each in call.keywords)
        if of_tqdm and not own and not named:
            yield Found(call, f"{path_of(call.func)}() runs on all ranks")
    if not script.uses_hvd or "keras" not in script.names.frameworks:
        return
    for call in script.everywhere(script.named("fit", "fit_generator")):
        if any(each.arg is None for each in call.keywords):
            continue
        verbose = keyword(call, "verbose", _VERBOSE_POSITION)
        if verbose is None or (isinstance(verbose, ast.Constant) and verbose.value):
            yield Found(call, "fit() reports its progress on all ranks")


RULES = (
    Rule(
        "HVD404",
        "print() on all ranks in a loop",
        "every line appears once for each rank",
        "print on rank 0 only, or begin the line with the rank",
        _printed,
    ),
    Rule(
        "HVD405",
        "a progress bar on all ranks",
        "the bars of all ranks overwrite one another",
        "tqdm(..., disable=rank() != 0); in Keras verbose=1 if hvd.rank() == 0 else 0",
        _bars,
    ),
)
