"""Which expressions are ranks, and which conditions hold on some ranks only."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from hvdtrain_lint.source.methods import Methods
from hvdtrain_lint.source.names import HVD, Names
from hvdtrain_lint.source.tree import Function, Tree, is_none, last_name, path_of, words_in
from hvdtrain_lint.source.values import Values

_RANK_NAMES = {
    *("rank", "local_rank", "global_rank", "cross_rank", "node_rank", "world_rank", "process_rank"),
    *("process_index", "local_process_index"),
}
_RANK_CALLS = _RANK_NAMES | {
    *("get_rank", "get_local_rank", "get_global_rank", "get_node_local_rank", "Get_rank"),
    "get_ordinal",
}
_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "SLURM_PROCID", "SLURM_LOCALID", "PMI_RANK"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "HOROVOD_RANK", "HOROVOD_LOCAL_RANK"),
}
_MAIN_NAMES = {
    *("is_main_process", "is_local_main_process", "is_last_process", "is_global_zero"),
    *("is_rank_zero", "is_rank_0", "is_chief"),
}
_SIZE_NAMES = {"world_size", "num_replicas", "num_ranks", "n_ranks", "num_processes", "nprocs"}
_SIZE_CALLS = {"size", "get_world_size", "Get_size", "local_size"}
_SIZE_VARIABLES = {"WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_NTASKS"}
# Words of conditions that may well say which rank this is.
_PERHAPS = re.compile(
    r"rank|main|master|chief|primary|leader|gpu|root|zero|coordinator|proc|worker|verbose|lead"
    r"|distributed|device|task|silent|quiet|host|logger|writer|head",
    re.IGNORECASE,
)


class Ranks:
    """Tells ranks and conditions on ranks from other expressions."""

    def __init__(self, tree: Tree, names: Names, values: Values, methods: Methods) -> None:
        self._names = names
        self._values = values
        self._methods = methods
        self._tree = tree
        self._asked: set[tuple[str, str | ast.AST]] = set()

    def is_rank(self, node: ast.expr) -> bool:
        """Return whether an expression is surely a rank, a local or a node's one included."""
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
            return self.is_rank(node.left)
        if isinstance(node, (ast.Name, ast.Attribute)):
            if last_name(node) in _RANK_NAMES:
                return not self._is_other_number(node)
            return self._every_value("rank", node, self.is_rank)
        if isinstance(node, ast.Subscript):
            return _is_variable(node.slice, _RANK_VARIABLES)
        if isinstance(node, ast.Call):
            return self._is_rank_call(node) or self._every_value("rank", node, self.is_rank)
        return False

    def is_size(self, node: ast.expr) -> bool:
        """Return whether an expression is surely the number of ranks."""
        if isinstance(node, (ast.Name, ast.Attribute)):
            if last_name(node) in _SIZE_NAMES:
                return True
            return self._every_value("size", node, self.is_size)
        if isinstance(node, ast.Subscript):
            return _is_variable(node.slice, _SIZE_VARIABLES)
        if not isinstance(node, ast.Call):
            return False
        last = self._names.last(node)
        if last in ("int", "float") and node.args:
            return self.is_size(node.args[0])
        if last == "size":
            return self._names.full(node) == f"{HVD}.size"
        if last in ("get", "getenv") and node.args:
            return _is_variable(node.args[0], _SIZE_VARIABLES)
        return last in _SIZE_CALLS or self._every_value("size", node, self.is_size)

    def mentions_rank(self, node: ast.AST) -> bool:
        """Return whether a rank, or a name made from one, is a part of an expression."""
        for each in ast.walk(node):
            if isinstance(each, ast.expr):
                if self.is_rank(each):
                    return True
                if isinstance(each, (ast.Name, ast.Attribute)):
                    for value in self._values.origins(each):
                        # An object that knows its rank, such as a sampler, does not show it.
                        if value is each or last_name(value)[:1].isupper():
                            continue
                        if any(
                            isinstance(part, ast.expr) and self.is_rank(part)
                            for part in ast.walk(value)
                        ):
                            return True
        return False

    def branches(self, test: ast.expr) -> tuple[bool, bool]:
        """Return whether only some ranks surely run what follows if a condition holds, and if not.

        Both are False for a condition that is the same on all ranks, or that is not understood.
        """
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            holds, fails = self.branches(test.operand)
            return fails, holds
        if isinstance(test, ast.BoolOp):
            parts = [self.branches(value) for value in test.values]
            if isinstance(test.op, ast.And):
                return any(holds for holds, _ in parts), all(fails for _, fails in parts)
            return all(holds for holds, _ in parts), any(fails for _, fails in parts)
        if isinstance(test, ast.Compare):
            found = len(test.ops) == 1 and self._is_comparison(test)
            return found, found
        found = self._is_main(test) or self.is_rank(test)
        return found, found

    def perhaps(self, test: ast.AST) -> bool:
        """Return whether a condition may depend on the rank."""
        if isinstance(test, ast.expr) and any(self.branches(test)):
            return True
        words = {word for word in words_in(test) if not word.startswith("__")}
        if any(_PERHAPS.search(word) for word in words):
            return True
        return any(
            _PERHAPS.search(word)
            for each in ast.walk(test)
            if isinstance(each, (ast.Name, ast.Attribute))
            for value in self._values.origins(each)
            if value is not each
            for word in words_in(value)
        )

    def _is_other_number(self, node: ast.Name | ast.Attribute) -> bool:
        """Return whether what is named as a rank is counted by a loop, or surely a constant."""
        if isinstance(node, ast.Name) and self._is_counted(node):
            return True
        values = [value for value in self._values.origins(node) if value is not node]
        numbers = [each.value for each in values if isinstance(each, ast.Constant)]
        if not values or len(numbers) < len(values) or None in numbers:
            return False
        # Other files may assign an attribute or give an argument: there, 0 may well be a rank.
        elsewhere = isinstance(node, ast.Attribute) or self._values.is_parameter(node)
        return not (elsewhere and 0 in numbers)

    def _is_counted(self, node: ast.Name) -> bool:
        around = (holder for holder, _ in self._tree.within(node))
        return any(
            last_name(loop.target) == node.id and last_name(loop.iter) == "range"
            for holder in around
            for loop in ([holder] if isinstance(holder, ast.For) else _generators(holder))
        )

    def _is_rank_call(self, node: ast.Call) -> bool:
        last = self._names.last(node)
        if last in ("int", "float") and node.args:
            return self.is_rank(node.args[0])
        if last in ("get", "getenv") and node.args:
            return _is_variable(node.args[0], _RANK_VARIABLES)
        return last in _RANK_CALLS

    def _is_comparison(self, test: ast.Compare) -> bool:
        left, operator, right = test.left, test.ops[0], test.comparators[0]
        if self.is_rank(right) and not self.is_rank(left):
            left, right = right, left
        if not self.is_rank(left):
            return self._compares_main(left, right)
        if isinstance(operator, (ast.In, ast.NotIn)):
            return isinstance(right, (ast.List, ast.Tuple, ast.Set))
        if isinstance(operator, (ast.Eq, ast.NotEq)):
            return not _is_minus_one(right) and not is_none(right)
        if isinstance(operator, (ast.Gt, ast.LtE)):
            return isinstance(right, ast.Constant)
        if isinstance(operator, (ast.Lt, ast.GtE)):
            return isinstance(right, ast.Constant) and right.value != 0
        return False

    def _compares_main(self, left: ast.expr, right: ast.expr) -> bool:
        is_flag = isinstance(right, ast.Constant) and isinstance(right.value, bool)
        return is_flag and self._is_main(left)

    def _is_main(self, node: ast.expr) -> bool:
        """Return whether a flag is true on some ranks only."""
        if isinstance(node, ast.Call):
            return last_name(node) in _MAIN_NAMES or self._returns_test(node)
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return False
        if last_name(node) in _MAIN_NAMES:
            return True
        return self._every_value("test", node, self._is_test)

    def _every_value(self, kind: str, node: ast.expr, holds: Callable[[ast.expr], bool]) -> bool:
        """Return whether all that a name is assigned is of a kind; x = int(x) says nothing."""
        asked = (kind, path_of(node) or node)
        if asked in self._asked:
            return False
        self._asked.add(asked)
        try:
            values = [value for value in self._values.origins(node) if value is not node]
            return bool(values) and all(holds(value) for value in values)
        finally:
            self._asked.remove(asked)

    def _is_test(self, value: ast.expr) -> bool:
        if isinstance(value, ast.IfExp):
            flags = [value.body, value.orelse]
            if not all(isinstance(flag, ast.Constant) for flag in flags):
                return False
            return self.branches(value.test)[0] and len({bool(f.value) for f in flags}) == 2  # type: ignore[attr-defined]
        return not isinstance(value, (ast.Name, ast.Attribute)) and self.branches(value)[0]

    def _returns_test(self, call: ast.Call) -> bool:
        called = self._methods.likely_called(call)
        return bool(called) and all(self._is_test_of_rank(function) for function in called)

    def _is_test_of_rank(self, function: Function) -> bool:
        returned = [n.value for n in self._tree.returns(function) if n.value is not None]
        return bool(returned) and all(
            isinstance(value, ast.Compare) and self.branches(value)[0] for value in returned
        )


def _generators(node: ast.AST) -> list[ast.comprehension]:
    """Return the loops of a comprehension."""
    return getattr(node, "generators", [])


def _is_variable(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Constant) and node.value in names


def _is_minus_one(node: ast.expr) -> bool:
    return isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub)
