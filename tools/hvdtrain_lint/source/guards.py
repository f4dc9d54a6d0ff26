"""Which statements of a script run on some ranks only, surely or perhaps."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain_lint.source.calls import Calls
from hvdtrain_lint.source.ranks import Ranks
from hvdtrain_lint.source.tree import Function, Tree, words_in

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


class Guards:
    """Finds conditions on ranks around and before statements."""

    def __init__(self, tree: Tree, ranks: Ranks, calls: Calls) -> None:
        self._tree = tree
        self._ranks = ranks
        self._calls = calls

    def sure(self, node: ast.AST) -> Branch | None:
        """Return the innermost condition around a node with which surely only some ranks run it."""
        for branch in self._branches(node):
            holds, fails = self._ranks.branches(branch.holder.test)
            if holds if branch.taken else fails:
                return branch
        return None

    def exits(self, node: ast.AST) -> ast.If | None:
        """Return an earlier `if` with which some ranks surely leave before they reach a node."""
        loops = self._tree.loops(node)
        for statement in self._tree.before(node):
            if isinstance(statement, ast.If) and not statement.orelse and statement.body:
                leaves = self._leaves(statement, statement.body[-1], loops)
                if leaves and all(self._ranks.branches(statement.test)):
                    return statement
        return None

    def perhaps(self, node: ast.AST) -> bool:
        """Return whether a node may run on some ranks only, or on one after the other."""
        return self._perhaps(node, frozenset())

    def _perhaps(self, node: ast.AST, seen: frozenset[ast.AST]) -> bool:
        if any(self._ranks.perhaps(branch.holder.test) for branch in self._branches(node)):
            return True
        if any(self._takes_turns(holder) for holder, _ in self._tree.within(node)):
            return True
        if self._short_circuit(node) or self._left_before(node):
            return True
        scope = self._tree.scope(node)
        if isinstance(scope, ast.Module) or scope in seen:
            return False
        if any(
            part in word
            for decorator in scope.decorator_list
            for word in words_in(decorator)
            for part in _ONE_RANK_DECORATORS
        ):
            return True
        return self._called_on_some(scope, seen | {scope})

    def _called_on_some(self, function: Function, seen: frozenset[ast.AST]) -> bool:
        sites = self._calls.sites(function)
        return bool(sites) and all(self._perhaps(site, seen) for site in sites)

    def _branches(self, node: ast.AST) -> Iterator[Branch]:
        for holder, child in self._tree.within(node):
            if isinstance(holder, (ast.If, ast.While)):
                if child in holder.body:
                    yield Branch(holder, True)
                elif child in holder.orelse:
                    yield Branch(holder, False)
            elif isinstance(holder, ast.IfExp) and child is not holder.test:
                yield Branch(holder, child is holder.body)

    def _takes_turns(self, holder: ast.AST) -> bool:
        if not isinstance(holder, (ast.With, ast.AsyncWith)):
            return False
        words = {word.lower() for item in holder.items for word in words_in(item.context_expr)}
        return any(part in word for word in words for part in _TURNS)

    def _short_circuit(self, node: ast.AST) -> bool:
        return any(
            isinstance(holder, ast.BoolOp)
            and any(self._ranks.perhaps(value) for value in holder.values if value is not child)
            for holder, child in self._tree.within(node)
        )

    def _left_before(self, node: ast.AST) -> bool:
        loops = self._tree.loops(node)
        return any(
            isinstance(statement, ast.If)
            and bool(statement.body)
            and self._leaves(statement, statement.body[-1], loops)
            and self._ranks.perhaps(statement.test)
            for statement in self._tree.before(node)
        )

    def _leaves(self, holder: ast.If, last: ast.stmt, loops: list[ast.For | ast.While]) -> bool:
        if isinstance(last, (ast.Continue, ast.Break)):
            around = self._tree.loops(holder)
            return bool(around) and around[0] in loops
        return isinstance(last, ast.Return)
