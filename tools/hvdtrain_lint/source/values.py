"""What the names and attributes of a script are assigned."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from hvdtrain_lint.source.methods import Methods
from hvdtrain_lint.source.names import Names
from hvdtrain_lint.source.tree import Function, Tree, is_none, last_name, path_of

_DEEPEST = 12
# They give back what they are given, in the order of their arguments.
_PREPARING = ("prepare", "setup")
# What of an expression is assigned: the element of this number, _EACH of them, or None: all of it.
_Part: TypeAlias = int | None
_EACH = -1


class Values:
    """The expressions that are assigned to names, arguments of functions in the script included.

    Values come from assignments, `with`, loops over lists, arguments, and what functions of the
    script return.
    """

    def __init__(self, tree: Tree, names: Names) -> None:
        self._tree = tree
        self._of_name: dict[tuple[ast.AST, str], list[tuple[ast.expr, _Part]]] = defaultdict(list)
        self._of_path: dict[tuple[ast.AST, str], list[tuple[ast.expr, _Part]]] = defaultdict(list)
        self._global = {
            (tree.scope(node), name)
            for node in tree.known
            if isinstance(node, ast.Global)
            for name in node.names
        }
        for node in tree.known:
            for target, value, part in _assigned(node):
                self._add(target, value, part)
        self._parameters: dict[ast.AST, set[str]] = {
            node: {each.arg for each in _all_parameters(node)}
            for node in tree.known
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        }
        self._asked: set[ast.Call] = set()
        names.assigned = self.of
        self._names = names
        self.methods = Methods(tree, names, self.origins)
        for call in (node for node in tree.known if isinstance(node, ast.Call)):
            for function in self.methods.likely_called(call):
                for name, value in _bound(function, call, tree, self.methods):
                    self._of_name[function, name].append((value, None))

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in self._parameters.get(self._tree.scope(node), ())

    def of(self, node: ast.AST) -> list[ast.expr]:
        """Return what a name or an attribute such as self.rank is assigned as a whole."""
        return [value for value, part in self._parts_of(node) if part is None]

    def origins(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions that names lead to; a name without any stands for itself."""
        found: list[ast.expr] = []
        self._follow(node, None, found, set())
        return found

    def makers(self, node: ast.expr) -> list[str]:
        """Return the full names of the functions and classes whose results an expression may be.

        "" stands for what is not known to be the result of a call.
        """
        return [
            self._names.full(each) or "" if isinstance(each, ast.Call) else ""
            for each in self.origins(node)
        ]

    def _parts_of(self, node: ast.AST) -> list[tuple[ast.expr, _Part]]:
        if isinstance(node, ast.Name):
            scope = self._tree.scope(node)
            while (scope, node.id) not in self._of_name:
                if isinstance(scope, ast.Module):
                    return self._imported(node)
                if node.id in self._parameters.get(scope, ()):
                    return []
                scope = self._tree.scope(scope)
            return self._of_name[scope, node.id]
        path = path_of(node)
        if path is None:
            return []
        return self._of_path.get((self._tree.root(node), path), [])

    def _imported(self, node: ast.Name) -> list[tuple[ast.expr, _Part]]:
        module, _, name = self._names.imported(node).rpartition(".")
        beside = self._tree.beside.get(module)
        return self._of_name.get((beside, name), []) if beside else []

    def _follow(
        self, node: ast.expr, part: _Part, found: list[ast.expr], seen: set[tuple[ast.AST, _Part]]
    ) -> None:
        if (node, part) in seen or len(seen) > _DEEPEST:
            return
        seen.add((node, part))
        values = self._parts_of(node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        if isinstance(node, ast.Call):
            values = [(value, None) for value in self._returned(node)]
        if not values:
            found += self._chosen(node, part, seen)
        for value, inner in values:
            if inner is None:
                self._follow(value, part, found, seen)
            else:
                chosen: list[ast.expr] = []
                self._follow(value, inner, chosen, seen)
                for each in chosen:
                    found += [each] if part is None else self._chosen(each, part, seen)

    def _chosen(
        self, node: ast.expr, part: _Part, seen: set[tuple[ast.AST, _Part]]
    ) -> list[ast.expr]:
        """Return what a part of an expression leads to; the expression where that is not seen."""
        elements: list[ast.expr] = []
        if part is not None and isinstance(node, (ast.Tuple, ast.List)):
            elements = node.elts
        elif part is not None and isinstance(node, ast.Call) and last_name(node) in _PREPARING:
            elements = node.args
        if part != _EACH:
            elements = elements[part : part + 1] if part is not None else []
        if not elements:
            return [node] if part != _EACH else []
        found: list[ast.expr] = []
        for element in elements:
            self._follow(element, None, found, seen)
        return found

    def _returned(self, call: ast.Call) -> list[ast.expr]:
        """Return what the functions of the script give that a call surely runs; [] if unknown."""
        if call in self._asked:  # a function that calls itself
            return []
        self._asked.add(call)
        called = self.methods.called(call)
        self._asked.remove(call)
        found: list[ast.expr] = []
        for function in called:
            own = [
                node.value
                for node in self._tree.returns(function)
                if node.value is not None and not is_none(node.value)
            ]
            if not own or function.name == "__init__":
                return []
            found += own
        return found

    def _add(self, target: ast.expr, value: ast.expr, part: _Part) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            literal = part is None and isinstance(value, (ast.Tuple, ast.List))
            same = literal and len(value.elts) == len(target.elts)  # type: ignore[attr-defined]
            for index, each in enumerate(target.elts):
                if same:
                    self._add(each, value.elts[index], None)  # type: ignore[attr-defined]
                elif part is None:
                    self._add(each, value, index)
        elif isinstance(target, ast.Name):
            scope = self._tree.scope(target)
            is_global = (scope, target.id) in self._global
            holder = self._tree.root(target) if is_global else scope
            self._of_name[holder, target.id].append((value, part))
        elif isinstance(target, ast.Attribute) and (path := path_of(target)):
            self._of_path[self._tree.root(target), path].append((value, part))


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, _Part]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value, None) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value, None
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter, _EACH
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield item.optional_vars, item.context_expr, None


def _all_parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    found = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return found + [each for each in (arguments.vararg, arguments.kwarg) if each]


def _bound(
    function: Function, call: ast.Call, tree: Tree, methods: Methods
) -> Iterator[tuple[str, ast.expr]]:
    positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
    implied = {"cls"} if methods.passes_self(call) else {"cls", "self"}
    if isinstance(tree.parent(function), ast.ClassDef) and implied.intersection(positional[:1]):
        positional = positional[1:]
    if not any(isinstance(each, ast.Starred) for each in call.args):
        yield from zip(positional, call.args, strict=False)
    yield from ((each.arg, each.value) for each in call.keywords if each.arg)
