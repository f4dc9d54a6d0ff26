"""Which statements of a script run on every rank, and which on some only, surely or perhaps."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from hvdtrain_lint.source.ranks import Ranks
from hvdtrain_lint.source.tree import Function, Scope, words_in
from hvdtrain_lint.source.values import HVD

_STARTS = {f"{HVD}.init", "torch.distributed.init_process_group"}
_STARTS_BY_LAST_NAME = {"init_process_group", "Accelerator", "init_distributed"}
# They start processes that run a function: what calls them is not a rank itself.
_STARTERS = {"spawn", "start_processes", "TorchDistributor", "notebook_launcher", "HorovodRunner"}
_STARTING_MODULES = ("hvdtrain", "horovod", "horovod.spark", "horovod.ray", "hvdtrain.spark")
_ONE_RANK_DECORATORS = (
    *("rank_zero", "on_main_process", "on_local_main_process", "main_process_only", "master_only"),
    *("is_master", "only_on"),
)
# Contexts that let one process in after the other, or rank 0 first.
_TURNS = ("lock", "first", "main_process", "main_rank", "rank_zero")


@dataclass(frozen=True)
class Branch:
    """A condition on ranks that decides whether a statement runs."""

    holder: ast.If | ast.IfExp | ast.While
    taken: bool


class Guards(Ranks):
    """Follows calls between functions, and finds conditions on ranks around and before them."""

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._sites: dict[ast.AST, list[ast.Call]] = defaultdict(list)
        self._called: dict[ast.AST, set[Function]] = defaultdict(set)
        for call in (node for node in self.known if isinstance(node, ast.Call)):
            for function in self.called(call):
                self._sites[function].append(call)
                self._called[self.scope(call)].add(function)
        starters = {self.scope(call) for call in self.calls if self._is_starter(call)}
        self.starts_processes = bool(starters)
        starts: set[Scope] = {self.scope(call) for call in self.calls if self._is_start(call)}

        def callers(scope: Scope) -> Iterator[Scope]:
            for site in self._sites.get(scope, ()):
                caller = self.scope(site)
                # A module that starts processes elsewhere is not a rank, whatever it calls.
                if caller not in starters and not (starters and isinstance(caller, ast.Module)):
                    yield caller

        self._on_ranks = self.reached(_reached(starts - starters, callers))

    def runs_on_ranks(self, node: ast.AST) -> bool:
        """Return whether every rank may get to a node."""
        return self.scope(node) in self._on_ranks

    def everywhere(self, calls: Iterable[ast.Call]) -> Iterator[ast.Call]:
        """Yield those calls that every rank surely makes."""
        return (call for call in calls if self.runs_on_ranks(call) and not self.is_guarded(call))

    def reached(self, scopes: Iterable[Scope]) -> set[Scope]:
        """Return functions and what they call, directly or not."""
        return _reached(scopes, lambda scope: self._called.get(scope, ()))

    def repeats(
        self,
        node: ast.AST,
        counts: Callable[[ast.For | ast.While], bool],
        seen: frozenset[Scope] = frozenset(),
    ) -> bool:
        """Return whether a node runs several times, in a loop or where its function is called."""
        if any(counts(loop) for loop in self.loops(node)):
            return True
        scope = self.scope(node)
        sites = () if scope in seen else self._sites.get(scope, ())
        return any(self.repeats(site, counts, seen | {scope}) for site in sites)

    def sure(self, node: ast.AST) -> Branch | None:
        """Return the innermost condition around a node with which surely only some ranks run it."""
        for branch in self._branches(node):
            if self.branches(branch.holder.test)[0 if branch.taken else 1]:
                return branch
        return None

    def exits(self, node: ast.AST) -> ast.If | None:
        """Return an earlier `if` with which some ranks surely leave before they reach a node."""
        found = (each for each in self._leaving(node) if not each.orelse)
        return next((each for each in found if all(self.branches(each.test))), None)

    def is_guarded(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Return whether a node may run on some ranks only, or on one after the other."""
        tests = [branch.holder.test for branch in self._branches(node)]
        for holder, child in self.within(node):
            if isinstance(holder, ast.BoolOp):
                tests += [value for value in holder.values if value is not child]
            elif isinstance(holder, (ast.With, ast.AsyncWith)):
                words = words_in(*(item.context_expr for item in holder.items))
                if any(part in word.lower() for word in words for part in _TURNS):
                    return True
        tests += [each.test for each in self._leaving(node)]
        if any(self.perhaps(test) for test in tests):
            return True
        scope = self.scope(node)
        if isinstance(scope, ast.Module) or scope in seen:
            return False
        words = words_in(*scope.decorator_list)
        if any(part in word for word in words for part in _ONE_RANK_DECORATORS):
            return True
        sites = self._sites.get(scope, [])
        return bool(sites) and all(self.is_guarded(site, seen | {scope}) for site in sites)

    def _is_start(self, call: ast.Call) -> bool:
        return self.full(call) in _STARTS or self.last(call) in _STARTS_BY_LAST_NAME

    def _is_starter(self, call: ast.Call) -> bool:
        module, _, last = self.full(call).rpartition(".")
        return self.last(call) in _STARTERS or (last == "run" and module in _STARTING_MODULES)

    def _branches(self, node: ast.AST) -> Iterator[Branch]:
        for holder, child in self.within(node):
            if isinstance(holder, (ast.If, ast.While)):
                if child in holder.body:
                    yield Branch(holder, True)
                elif child in holder.orelse:
                    yield Branch(holder, False)
            elif isinstance(holder, ast.IfExp) and child is not holder.test:
                yield Branch(holder, child is holder.body)

    def _leaving(self, node: ast.AST) -> Iterator[ast.If]:
        """Yield the earlier conditions that end in a return, or in leaving a loop around `node`."""
        loops = self.loops(node)
        for statement in self.before(node):
            if isinstance(statement, ast.If):
                last = statement.body[-1]
                ends = isinstance(last, (ast.Continue, ast.Break))
                left = ends and any(each in loops for each in self.loops(statement)[:1])
                if left or isinstance(last, ast.Return):
                    yield statement


def _reached(scopes: Iterable[Scope], leads: Callable[[Scope], Iterable[Scope]]) -> set[Scope]:
    """Return scopes and all to which they lead, directly or not."""
    found = set(scopes)
    waiting = list(found)
    while waiting:
        for each in leads(waiting.pop()):
            if each not in found:
                found.add(each)
                waiting.append(each)
    return found
