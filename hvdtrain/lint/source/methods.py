"""Which functions and methods of a script a call runs."""

from __future__ import annotations

import ast
from collections import defaultdict

from hvdtrain.lint.source.names import Names
from hvdtrain.lint.source.tree import Function, Tree, last_name, path_of
from hvdtrain.lint.source.values import Values

__all__ = ["Methods"]

_MOST_BASES = 10


class Methods:
    """Finds what calls run; a method only where the text tells the class of its owner.

    Args:
        tree: the script.
        names: its imports.
        values: its assignments.
    """

    def __init__(self, tree: Tree, names: Names, values: Values) -> None:
        self._tree = tree
        self._names = names
        self._values = values
        self._functions: dict[str, list[Function]] = defaultdict(list)
        self._methods: dict[ast.AST, dict[str, Function]] = defaultdict(dict)
        for function in tree.functions:
            owner = tree.parent(function)
            if isinstance(owner, ast.ClassDef):
                self._methods[owner][function.name] = function
            else:
                self._functions[function.name].append(function)
        classes = [node for node in tree.nodes if isinstance(node, ast.ClassDef)]
        self._classes = {node.name: node for node in classes}

    def called(self, call: ast.Call) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain."""
        if self._names.is_of_import(call.func):
            return []
        if isinstance(call.func, ast.Attribute):
            return self._of_owner(call.func.value, call.func.attr)
        name = last_name(call)
        return self._method(self._classes.get(name), "__init__") or self._functions.get(name, [])

    def _of_owner(self, owner: ast.expr, name: str) -> list[Function]:
        if path_of(owner) in ("self", "cls"):
            return self._method(self._class_around(owner), name)
        if isinstance(owner, ast.Name) and owner.id in self._classes:
            return self._method(self._classes[owner.id], name)
        origins = [each for each in self._values.origins(owner) if not _is_none(each)]
        found: list[Function] = []
        for origin in origins:
            made = origin.func if isinstance(origin, ast.Call) else None
            known = self._classes.get(made.id) if isinstance(made, ast.Name) else None
            if known is None:
                return []
            found += self._method(known, name)
        return list(dict.fromkeys(found))

    def _class_around(self, node: ast.AST) -> ast.ClassDef | None:
        around = self._tree.ancestors(node)
        return next((each for each in around if isinstance(each, ast.ClassDef)), None)

    def _method(self, owner: ast.ClassDef | None, name: str, depth: int = 0) -> list[Function]:
        """Return a method of a class or of its bases in the script."""
        if owner is None or depth > _MOST_BASES:
            return []
        if name in self._methods.get(owner, ()):
            return [self._methods[owner][name]]
        for base in owner.bases:
            found = self._method(self._classes.get(last_name(base)), name, depth + 1)
            if found:
                return found
        return []


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
