"""Which expressions are ranks, and which statements run on every rank or on some only."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from hvdtrain_lint.source.tree import (
    HVD,
    NAMES,
    Scope,
    constant,
    last_name,
    parameters_of,
    path_of,
    words_in,
)
from hvdtrain_lint.source.values import Values

_RANK, _SIZE = "rank", "size"
_WORDS = {
    _RANK: re.compile(
        r"((local|global|cross|node|world|process)_)?rank|(local_)?process_index"
        r"|get_((local|global|node_local)_)?rank|Get_rank|get_ordinal"
    ),
    _SIZE: re.compile(
        r"(get_)?world_size|num_(replicas|ranks|processes)|n_ranks|nprocs|Get_size|local_size"
    ),
}
_VARIABLES = {
    _RANK: re.compile(
        r"(LOCAL_|NODE_|GROUP_|PMI_)?RANK|SLURM_(PROCID|LOCALID)"
        r"|(OMPI_COMM_WORLD|HOROVOD)_(LOCAL_)?RANK"
    ),
    _SIZE: re.compile(r"(WORLD|HOROVOD|OMPI_COMM_WORLD)_SIZE|SLURM_NTASKS"),
}
_MIRRORED = {ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE}
_MAIN = re.compile(r"is_((local_)?main|last)_process|is_(global_zero|rank_zero|rank_0|chief)")
# Words of conditions that may well say which rank this is.
_PERHAPS = re.compile(
    r"(?i)rank|main|master|chief|primary|leader|gpu|root|zero|coordinator|proc|worker|verbose|lead"
    r"|distributed|device|task|silent|quiet|host|logger|writer|head"
)


@dataclass(frozen=True)
class Branch:
    """A condition that decides whether a node runs: whether it has to hold, and what runs else."""

    test: ast.expr
    holds: bool
    line: int
    other: Sequence[ast.AST] = field(compare=False)


class Guards(Values):
    """Tells ranks from other expressions, and finds conditions on them around and before calls."""

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._questions: set[tuple[object, str | ast.AST]] = set()
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
        inits = (c for c in self.calls if self.last(c) in _STARTS or self.full(c) == f"{HVD}.init")
        starts = {self.scope(call) for call in inits} - starters
        self.starts_processes = bool(starters)
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

    def is_rank(self, node: ast.AST) -> bool:
        """Return whether an expression is surely a rank, a local or a node's one included."""
        return self._is_number(_RANK, node)

    def is_size(self, node: ast.AST) -> bool:
        """Return whether an expression is surely the number of ranks."""
        return self._is_number(_SIZE, node)

    def mentions_rank(self, *nodes: ast.AST) -> bool:
        """Return whether a rank, or a name made from one, is a part of expressions."""
        values = list(nodes)
        # An object that knows its rank, such as a sampler, does not show it.
        values += [v for v in self._named_in(*nodes) if not last_name(v)[:1].isupper()]
        return any(self.is_rank(part) for value in values for part in ast.walk(value))

    def branches(self, test: ast.expr) -> tuple[bool, bool]:
        """Return whether only some ranks surely run what follows if a condition holds, and if not.

        Both are False for a condition that is the same on all ranks, or that is not understood.
        """
        match test:
            case ast.UnaryOp(ast.Not(), operand):
                return self.branches(operand)[::-1]
            case ast.BoolOp(operator, values):
                holding, failing = zip(*map(self.branches, values), strict=True)
                if isinstance(operator, ast.And):
                    return any(holding), all(failing)
                return all(holding), any(failing)
            case ast.Compare(left, [operator], [right]):
                if self.is_rank(right) and not self.is_rank(left):
                    left, right = right, left
                    operator = _MIRRORED.get(type(operator), type(operator))()
                found = self._compares(left, operator, right)
            case _ if _MAIN.fullmatch(last_name(test)) or self.is_rank(test):
                found = True
            case _:
                holds = self._every_value("holds", test, lambda value: self._flag(value)[0])
                fails = self._every_value("fails", test, lambda value: self._flag(value)[1])
                return holds, fails
        return found, found

    def perhaps(self, test: ast.expr) -> bool:
        """Return whether a condition may depend on the rank."""
        words = {word for word in words_in(test) if not word.startswith("__")}
        words |= words_in(*self._named_in(test))
        return any(self.branches(test)) or any(map(_PERHAPS.search, words))

    def _named_in(self, *nodes: ast.AST) -> list[ast.expr]:
        """Return what the names in expressions stand for."""
        names = (e for node in nodes for e in ast.walk(node) if isinstance(e, NAMES))
        return [value for name in names for value in self.behind(name)]

    def _is_number(self, kind: str, node: ast.AST) -> bool:
        key: ast.AST | None = None
        match node:
            case ast.BinOp(left, ast.Mod()):
                return kind == _RANK and self._is_number(kind, left)
            case ast.Name() | ast.Attribute() if _WORDS[kind].fullmatch(last_name(node)):
                return kind == _SIZE or not self._is_other_number(node)
            case ast.Subscript(_, key):
                pass
            case ast.Call():
                is_size = kind == _SIZE and self.full(node) == f"{HVD}.size"
                if is_size or _WORDS[kind].fullmatch(self.last(node)):
                    return True
                if self.last(node) in ("get", "getenv") and node.args:
                    key = node.args[0]
        if key and _VARIABLES[kind].fullmatch(str(constant(key))):
            return True
        return self._every_value(kind, node, partial(self._is_number, kind))

    def _is_other_number(self, node: ast.Name | ast.Attribute) -> bool:
        """Return whether what is named as a rank is counted by a loop, or surely a constant."""
        around = [holder for holder, _ in self.within(node)]
        loops = [each for each in around if isinstance(each, ast.For)]
        loops += [each for holder in around for each in getattr(holder, "generators", [])]
        ranges = (loop.target for loop in loops if last_name(loop.iter) == "range")
        if path_of(node) in map(path_of, ranges):
            return True
        values = self.behind(node)
        numbers = [each.value for each in values if isinstance(each, ast.Constant)]
        if not values or len(numbers) < len(values) or None in numbers:
            return False
        # Other files may assign an attribute or give an argument: there, 0 may well be a rank.
        elsewhere = isinstance(node, ast.Attribute) or node.id in parameters_of(self.scope(node))
        return not elsewhere or 0 not in numbers

    def _compares(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> bool:
        if not self.is_rank(left):
            return isinstance(constant(right), bool) and self.branches(left)[0]
        match operator, right:
            case ast.In() | ast.NotIn(), _:
                return isinstance(right, (ast.List, ast.Tuple, ast.Set))
            case ast.Eq() | ast.NotEq(), _:  # a process that is alone may have the rank -1
                is_minus_one = isinstance(right, ast.UnaryOp) and isinstance(right.op, ast.USub)
                return not is_minus_one and constant(right) is not None
            case ast.Lt() | ast.GtE(), ast.Constant(0):
                return False
        return isinstance(right, ast.Constant) and not isinstance(operator, (ast.Is, ast.IsNot))

    def _every_value(self, kind: object, node: ast.AST, holds: Callable[[ast.expr], bool]) -> bool:
        """Return whether all that a name is assigned is of a kind; x = int(x) says nothing."""
        asked = (kind, path_of(node) or node)
        if asked in self._questions:
            return False
        self._questions.add(asked)
        try:
            values = self.behind(node)  # type: ignore[arg-type]
            return bool(values) and all(map(holds, values))
        finally:
            self._questions.remove(asked)

    def _flag(self, value: ast.expr) -> tuple[bool, bool]:
        match value:
            case ast.IfExp(test, ast.Constant(one), ast.Constant(other)):
                either = self.branches(test) if bool(one) != bool(other) else (False, False)
                return either if one else either[::-1]
            case ast.Name() | ast.Attribute():
                return False, False
        return self.branches(value)


_STARTS = {"init_process_group", "Accelerator", "init_distributed"}
# They start processes that run a function: what calls them is not a rank itself.
_STARTERS = {"spawn", "start_processes", "TorchDistributor", "notebook_launcher", "HorovodRunner"}
_STARTING_MODULES = ("hvdtrain", "horovod", "horovod.spark", "horovod.ray", "hvdtrain.spark")
# Contexts and decorators that let one process in after the other, rank 0 first, or one only.
_ALONE = re.compile(
    r"(?i)lock|first|main_process|main_rank|rank_zero|master_only|is_master|only_on"
)


def _reached(scopes: Iterable[Scope], leads: Callable[[Scope], Iterable[Scope]]) -> set[Scope]:
    found: set[Scope] = set()
    waiting = list(scopes)
    while waiting:
        if (scope := waiting.pop()) not in found:
            found.add(scope)
            waiting += leads(scope)
    return found
