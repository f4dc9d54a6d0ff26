"""What the names and attributes of a script are assigned."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from hvdtrain.lint.source.methods import Methods
from hvdtrain.lint.source.tree import Function, Tree, path_of

__all__ = ["Values"]

_DEEPEST = 12


class Values:
    """The expressions that are assigned to names, arguments of functions in the script included.

    Args:
        tree: the script.
    """

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._of_name: dict[tuple[ast.AST, str], list[ast.expr]] = defaultdict(list)
        self._of_path: dict[str, list[ast.expr]] = defaultdict(list)
        self._parameters: dict[ast.AST, set[str]] = {}
        self._global = {
            (tree.scope(node), name)
            for node in tree.nodes
            if isinstance(node, ast.Global)
            for name in node.names
        }
        for node in tree.nodes:
            for target, value in _assigned(node):
                self._add(target, value)
        for function in tree.functions:
            self._parameters[function] = {each.arg for each in _all_parameters(function)}

    def add_arguments(self, methods: Methods) -> None:
        """Take what calls give to the functions of the script for values of their parameters.

        Args:
            methods: what calls run, by the values known so far.
        """
        for call in self._tree.calls:
            for function in methods.likely_called(call):
                for name, value in _bound(function, call, self._tree, methods):
                    self._of_name[function, name].append(value)

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in self._parameters.get(self._tree.scope(node), ())

    def of(self, node: ast.AST) -> list[ast.expr]:
        """Return what a name or an attribute such as self.rank is assigned, in this script."""
        if isinstance(node, ast.Name):
            scopes = [self._tree.scope(node), *self._tree.ancestors(self._tree.scope(node))]
            for scope in scopes:
                if (scope, node.id) in self._of_name:
                    return self._of_name[scope, node.id]
                if node.id in self._parameters.get(scope, ()):
                    return []
            return []
        path = path_of(node)
        return self._of_path.get(path, []) if path else []

    def origins(self, node: ast.expr) -> list[ast.expr]:
        """Return the expressions that names lead to; a name without any stands for itself."""
        found: list[ast.expr] = []
        self._follow(node, found, set())
        return found

    def _follow(self, node: ast.expr, found: list[ast.expr], seen: set[ast.AST]) -> None:
        if node in seen or len(seen) > _DEEPEST:
            return
        seen.add(node)
        values = self.of(node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        if not values:
            found.append(node)
        for value in values:
            self._follow(value, found, seen)

    def _add(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            same = len(parts) == len(target.elts)
            for index, each in enumerate(target.elts):
                self._add(each, parts[index] if same else value)
        elif isinstance(target, ast.Name):
            scope = self._tree.scope(target)
            is_global = (scope, target.id) in self._global
            self._of_name[self._tree.module if is_global else scope, target.id].append(value)
        elif isinstance(target, ast.Attribute) and (path := path_of(target)):
            self._of_path[path].append(value)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value
    elif isinstance(node, (ast.With, ast.AsyncWith)):
        for item in node.items:
            if item.optional_vars is not None:
                yield item.optional_vars, item.context_expr


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
