"""Which functions of a script call which, and which of them run on every rank."""

from __future__ import annotations

import ast
from collections import defaultdict

from hvdtrain_lint.source.methods import Methods
from hvdtrain_lint.source.names import HVD, Names
from hvdtrain_lint.source.tree import Function, Scope, Tree

_STARTS = {f"{HVD}.init", "torch.distributed.init_process_group"}
_STARTS_BY_LAST_NAME = {"init_process_group", "Accelerator", "init_distributed"}
# They start processes that run a function: what calls them is not a rank itself.
_STARTERS = {"spawn", "start_processes", "TorchDistributor", "notebook_launcher", "HorovodRunner"}
_STARTING_MODULES = ("hvdtrain", "horovod", "horovod.spark", "horovod.ray", "hvdtrain.spark")


class Calls:
    """Follows calls between the functions of a script."""

    def __init__(self, tree: Tree, names: Names, methods: Methods) -> None:
        self._tree = tree
        self._names = names
        self._sites: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        self._called: dict[ast.AST, set[Function]] = defaultdict(set)
        for call in (node for node in tree.known if isinstance(node, ast.Call)):
            for function in methods.called(call):
                self._sites[function].append(call)
                self._called[tree.scope(call)].add(function)
        self._starters = {tree.scope(call) for call in tree.calls if self._is_starter(call)}
        self.starts_processes = bool(self._starters)
        self.on_ranks = self._reached(self._find_starting())

    def sites(self, function: Function) -> list[ast.Call]:
        """Return the calls of a function."""
        return self._sites.get(function, [])

    def runs_on_ranks(self, node: ast.AST) -> bool:
        """Return whether every rank may get to a node."""
        return self._tree.scope(node) in self.on_ranks

    def reached(self, scope: Scope) -> set[Scope]:
        """Return a scope and what it calls, directly or not."""
        return self._reached({scope})

    def _find_starting(self) -> set[Scope]:
        starters = self._starters
        found = {self._tree.scope(call) for call in self._tree.calls if self._is_start(call)}
        found -= starters
        more = set(found)
        while more:
            callers = {
                self._tree.scope(site)
                for function in more
                if not isinstance(function, ast.Module)
                for site in self.sites(function)
            }
            more = callers - found - starters
            # A module that starts processes elsewhere is not a rank, whatever it calls.
            more = {s for s in more if not (starters and isinstance(s, ast.Module))}
            found |= more
        return found

    def _is_start(self, call: ast.Call) -> bool:
        return self._names.full(call) in _STARTS or self._names.last(call) in _STARTS_BY_LAST_NAME

    def _is_starter(self, call: ast.Call) -> bool:
        if self._names.last(call) in _STARTERS:
            return True
        full = self._names.full(call) or ""
        module, _, last = full.rpartition(".")
        return last == "run" and module in _STARTING_MODULES

    def _reached(self, scopes: set[Scope]) -> set[Scope]:
        found = set(scopes)
        more = list(scopes)
        while more:
            for function in self._called.get(more.pop(), ()):
                if function not in found:
                    found.add(function)
                    more.append(function)
        return found
