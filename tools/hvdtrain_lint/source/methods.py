"""Which functions and methods of a script a call runs."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

from hvdtrain_lint.source.names import Names
from hvdtrain_lint.source.tree import Function, Tree, is_none, last_name, path_of

_MOST_BASES = 10
_Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Methods:
    """What calls run: functions where Python finds them, methods by the class of their owner."""

    def __init__(
        self, tree: Tree, names: Names, origins: Callable[[ast.expr], list[ast.expr]]
    ) -> None:
        self._tree = tree
        self._names = names
        self._origins = origins
        self._defined: dict[tuple[ast.AST, str], list[_Definition]] = defaultdict(list)
        self._of_any_class: dict[str, list[Function]] = defaultdict(list)
        for node in tree.known:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                holder = self._holder(node)
                self._defined[holder, node.name].append(node)
                if isinstance(holder, ast.ClassDef) and not isinstance(node, ast.ClassDef):
                    self._of_any_class[node.name].append(node)

    def called(self, call: ast.Call) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain."""
        function = call.func
        module, _, name = (self._names.full(function) or "").rpartition(".")
        if module in self._tree.beside:
            return self._run(self._defined.get((self._tree.beside[module], name), []))
        if self._names.is_of_import(function):
            return []
        if isinstance(function, ast.Attribute):
            return self._of_owner(function.value, function.attr)
        return self._run(self._visible(function)) if isinstance(function, ast.Name) else []

    def _run(self, defined: list[_Definition]) -> list[Function]:
        """Return what runs when one of these is called."""
        found: list[Function] = []
        for each in defined:
            found += self._method(each, "__init__") if isinstance(each, ast.ClassDef) else [each]
        return found

    def likely_called(self, call: ast.Call) -> list[Function]:
        """Return the same; for an owner of which nothing is known, the only method of that name."""
        found = self.called(call)
        if found or not self._has_unknown_owner(call.func):
            return found
        named = self._of_any_class.get(last_name(call), [])
        return named if len(named) == 1 else []

    def passes_self(self, call: ast.Call) -> bool:
        """Return whether a call names the class of a method, as in Base.__init__(self)."""
        function = call.func
        return isinstance(function, ast.Attribute) and self._class_of(function.value) is not None

    def _has_unknown_owner(self, function: ast.expr) -> bool:
        if not isinstance(function, ast.Attribute) or self._names.is_of_import(function):
            return False
        owner = function.value
        if path_of(owner) in ("self", "cls") or self._class_of(owner):
            return False
        return all(isinstance(each, (ast.Name, ast.Attribute)) for each in self._origins(owner))

    def _of_owner(self, owner: ast.expr, name: str) -> list[Function]:
        if path_of(owner) in ("self", "cls"):
            return self._method(self._class_around(owner), name)
        if known := self._class_of(owner):
            return self._method(known, name)
        origins = [each for each in self._origins(owner) if not is_none(each)]
        found: list[Function] = []
        for origin in origins:
            known = self._class_of(origin.func) if isinstance(origin, ast.Call) else None
            if known is None:
                return []
            found += self._method(known, name)
        return list(dict.fromkeys(found))

    def _visible(self, name: ast.Name) -> list[_Definition]:
        """Return what a name stands for; Python does not look into the classes around it."""
        scope = self._tree.scope(name)
        while (scope, name.id) not in self._defined and not isinstance(scope, ast.Module):
            scope = self._tree.scope(scope)
        return self._defined.get((scope, name.id), [])

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the script that a name stands for, if it is one for certain."""
        module, _, name = (self._names.full(node) or "").rpartition(".")
        if module in self._tree.beside:
            found = self._defined.get((self._tree.beside[module], name), [])
        else:
            found = self._visible(node) if isinstance(node, ast.Name) else []
        return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None

    def _class_around(self, node: ast.AST) -> ast.ClassDef | None:
        around = self._tree.ancestors(node)
        return next((each for each in around if isinstance(each, ast.ClassDef)), None)

    def _holder(self, node: _Definition) -> ast.AST:
        """Return the class, the function or the module whose name a definition is."""
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.Module)
        return next(each for each in self._tree.ancestors(node) if isinstance(each, kinds))

    def _method(self, owner: ast.ClassDef | None, name: str, depth: int = 0) -> list[Function]:
        """Return a method of a class or of its bases in the script."""
        if owner is None or depth > _MOST_BASES:
            return []
        own = self._defined.get((owner, name), [])
        if functions := [each for each in own if not isinstance(each, ast.ClassDef)]:
            return functions[-1:]  # Python keeps the last one
        for base in owner.bases:
            found = self._method(self._class_of(base), name, depth + 1)
            if found:
                return found
        return []
