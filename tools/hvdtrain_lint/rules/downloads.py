"""Data sets that all ranks download at once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from hvdtrain_lint.rules.rule import Found, Rule
from hvdtrain_lint.source.data import is_true
from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import last_name, path_of

_KERAS_SETS = {
    *("mnist", "fashion_mnist", "cifar10", "cifar100", "imdb", "reuters", "boston_housing"),
    "california_housing",
}


def _downloaded(script: Script) -> Iterator[Found]:
    downloads = [call for call in script.tree.calls if _downloads(script, call)]
    if _one_rank_is_first(script):
        return
    for call in script.everywhere(downloads):
        arguments = [*call.args, *(each.value for each in call.keywords)]
        if not any(script.ranks.mentions_rank(each) for each in arguments):
            yield Found(call, f"{path_of(call.func)}() downloads on all ranks at once")


def _downloads(script: Script, call: ast.Call) -> bool:
    asked = keyword(call, "download")
    if asked is not None and all(is_true(each) for each in script.values.origins(asked)):
        return True
    full = (script.names.full(call) or "").split(".")
    of_keras = script.names.imports("keras", "tensorflow")
    return of_keras and full[-1] == "load_data" and len(full) > 1 and full[-2] in _KERAS_SETS


def _one_rank_is_first(script: Script) -> bool:
    """Return whether a barrier or a download of one rank lets it come before the others."""
    return any(
        script.guards.perhaps(call)
        for call in script.tree.calls
        if last_name(call) in ("barrier", "wait_for_everyone")
        or "download" in last_name(call).lower()
        or _downloads(script, call)
    )


RULES = (
    Rule(
        "HVD406",
        "a data set that all ranks download",
        "a rank may read files that another one is still writing",
        "let local_rank() 0 download it first, then barrier(), or put the rank into the path",
        _downloaded,
    ),
)
