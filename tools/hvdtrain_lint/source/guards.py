"""Which statements of a script run on every rank, and which on some only, surely or perhaps."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hvdtrain_lint.source.names import HVD
from hvdtrain_lint.source.ranks import RankValues
from hvdtrain_lint.source.tree import Scope, words_in

_STARTS = {"init_process_group", "Accelerator", "init_distributed"}
# They start processes that run a function: what calls them is not a rank itself.
_STARTERS = {"spawn", "start_processes", "TorchDistributor", "notebook_launcher", "HorovodRunner"}
_STARTING_MODULES = ("hvdtrain", "horovod", "horovod.spark", "horovod.ray", "hvdtrain.spark")
# Contexts and decorators that let one process in after the other, rank 0 first, or one only.
_ALONE = re.compile(
    r"(?i)lock|first|main_process|main_rank|rank_zero|master_only|is_master|only_on"
)


@dataclass(frozen=True)
class Branch:
    """A condition that decides whether a node runs: whether it has to hold, and what runs else."""

    test: ast.expr
    holds: bool
    line: int
    other: Sequence[ast.AST] = field(compare=False)


class Guards(RankValues):
    """Follows calls between functions, and finds conditions on ranks around and before them."""

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._sites: dict[Scope, list[ast.expr]] = defaultdict(list)
        self._called: dict[Scope, set[Scope]] = defaultdict(set)
        for call in (each for each in self.known if isinstance(each, ast.Call)):
            for function in self.called(call):
                self._sites[function].append(call)
        for each in (each for each in self.known if isinstance(each, ast.Lambda)):
            self._sites[each] = self._sites[each] or [each]  # whoever gets it calls it
        for scope, sites in self._sites.items():
            for site in sites:
                self._called[self.scope(site)].add(scope)
        starters: set[Scope] = {self.scope(call) for call in self.calls if self._is_starter(call)}
        self.starts_processes = bool(starters)
        starts = {self.scope(call) for call in self.calls if self._is_start(call)} - starters
        if starters:  # a module that starts processes elsewhere is not a rank, whatever it calls
            starters.add(self.module)
        self._on_ranks = self.reached(
            _reached(starts, lambda scope: {self.scope(s) for s in self._sites[scope]} - starters)
        )

    def runs_on_ranks(self, node: ast.AST) -> bool:
        """Return whether every rank may get to a node."""
        return self.scope(node) in self._on_ranks

    def everywhere(self, calls: Iterable[ast.Call]) -> Iterator[ast.Call]:
        """Yield those calls that every rank surely makes."""
        return (call for call in calls if self.runs_on_ranks(call) and not self.is_guarded(call))

    def reached(self, scopes: Iterable[Scope]) -> set[Scope]:
        """Return functions and what they call, directly or not."""
        return _reached(scopes, lambda scope: self._called[scope])

    def repeats(self, node: ast.AST, counts: Callable[[ast.For | ast.While], bool]) -> bool:
        """Return whether a node runs several times, in a loop or where its function is called."""
        callers = _reached([self.scope(node)], lambda each: map(self.scope, self._sites[each]))
        sites = [node, *(site for caller in callers for site in self._sites[caller])]
        return any(counts(loop) for each in sites for loop in self.loops(each))

    def sure(self, node: ast.AST) -> Branch | None:
        """Return the innermost condition around a node with which surely only some ranks run it."""
        found = (b for b in self._branches(node) if self.branches(b.test)[not b.holds])
        return next(found, None)

    def on_some(self, calls: Iterable[ast.Call]) -> Iterator[tuple[ast.Call, Branch]]:
        """Yield those calls that surely only some ranks make, and the conditions around them."""
        return ((call, branch) for call in calls if (branch := self.sure(call)))

    def exits(self, node: ast.AST) -> ast.If | None:
        """Return an earlier `if` with which some ranks surely leave before they reach a node."""
        return next((each for each in self._leaving(node) if all(self.branches(each.test))), None)

    def is_guarded(self, node: ast.AST, seen: frozenset[ast.AST] = frozenset()) -> bool:
        """Return whether a node may run on some ranks only, or on one after the other."""
        tests = [branch.test for branch in self._branches(node)]
        tests += [each.test for each in self._leaving(node)]
        if any(map(self.perhaps, tests)) or any(map(_ALONE.search, self.contexts(node))):
            return True
        scope = self.scope(node)
        sites = [] if scope in seen else self._sites[scope]
        return bool(sites) and all(self.is_guarded(site, seen | {scope}) for site in sites)

    def contexts(self, node: ast.AST) -> set[str]:
        """Return the words in `with` around a node, and in decorators of the function around it."""
        around = (h for h, _ in self.within(node) if isinstance(h, (ast.With, ast.AsyncWith)))
        contexts = (item.context_expr for holder in around for item in holder.items)
        return words_in(*contexts, *getattr(self.scope(node), "decorator_list", ()))

    def _is_start(self, call: ast.Call) -> bool:
        return self.full(call) == f"{HVD}.init" or self.last(call) in _STARTS

    def _is_starter(self, call: ast.Call) -> bool:
        module, _, last = self.full(call).rpartition(".")
        return self.last(call) in _STARTERS or (last == "run" and module in _STARTING_MODULES)

    def _branches(self, node: ast.AST) -> Iterator[Branch]:
        """Yield the conditions around a node, innermost first."""
        for holder, child in self.within(node):
            match holder:
                case ast.If(test, body, other) | ast.While(test, body, other) if child is not test:
                    holds = child in body
                    yield Branch(test, holds, holder.lineno, other if holds else body)
                case ast.IfExp(test, one, other) if child is not test:
                    holds = child is one
                    yield Branch(test, holds, holder.lineno, [other if holds else one])
                case ast.BoolOp(operator, values):
                    for each in values[: values.index(child)]:  # type: ignore[arg-type]
                        yield Branch(each, isinstance(operator, ast.And), holder.lineno, [])
                case _ if child not in (loops := getattr(holder, "generators", [])):
                    for test in (test for loop in loops for test in loop.ifs):
                        yield Branch(test, True, test.lineno, [])
        scope = self.scope(node)
        if isinstance(scope, ast.Lambda) and self._sites[scope] == [scope]:
            yield from self._branches(scope)

    def _leaving(self, node: ast.AST) -> Iterator[ast.If]:
        """Yield the earlier conditions of which one side ends in leaving what holds `node`."""
        loops = self.loops(node)

        def leaves(block: list[ast.stmt]) -> bool:
            match block:
                case [*_, ast.If(_, body, other)]:
                    return leaves(body) and leaves(other)
                case [*_, (ast.Continue() | ast.Break()) as last]:
                    return any(each in loops for each in self.loops(last)[:1])
            return bool(block) and isinstance(block[-1], ast.Return)

        for statement in self.before(node):
            if isinstance(statement, ast.If) and leaves(statement.body) != leaves(statement.orelse):
                yield statement


def _reached(scopes: Iterable[Scope], leads: Callable[[Scope], Iterable[Scope]]) -> set[Scope]:
    """Return scopes and all to which they lead, directly or not."""
    found: set[Scope] = set()
    waiting = list(scopes)
    while waiting:
        if (scope := waiting.pop()) not in found:
            found.add(scope)
            waiting += leads(scope)
    return found
