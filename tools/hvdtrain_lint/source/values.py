"""What names stand for: imports, what they are assigned, and which functions calls run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from hvdtrain_lint.source.tree import (
    FUNCTIONS,
    SCOPES,
    Function,
    Tree,
    constant,
    last_name,
    path_of,
)

HVD = "hvd"
_ROOTS = ("horovod", "hvdtrain")
_FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet")
_MOST_NAMES, _MOST_VALUES, _MOST_BASES = 8, 12, 10
# They give back what they are given, in the order of their arguments.
_PREPARING = ("prepare", "setup")
# What of an expression is assigned: the element of this number, _EACH of them, or None: all of it.
_Part: TypeAlias = int | None
_EACH = -1
_Parts: TypeAlias = list[tuple[ast.expr, _Part]]
_Definition: TypeAlias = Function | ast.ClassDef


class Values(Tree):
    """Follows values within a script and the modules beside it.

    Values come from imports, assignments, `with`, loops over lists, arguments, and what functions
    of the script return. `modules` holds full names of all that the script imports, `frameworks`
    those of which it imports Horovod's interface, `from_horovod` whether from Horovod.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._full: dict[ast.AST, dict[str, str]] = {m: {} for m in (module, *beside.values())}
        self._values: dict[tuple[ast.AST | None, str], _Parts] = defaultdict(list)
        self._global: set[tuple[ast.AST, str]] = set()
        self._defined: dict[tuple[ast.AST, str], list[_Definition]] = defaultdict(list)
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._parameters: dict[ast.AST | None, set[str]] = {}
        self._returns: dict[Function, list[ast.expr]] = {}
        self._asked: set[ast.Call] = set()
        for node in self.known:
            self._learn(node)
        own = (name for node in self.nodes for name, is_near in _named_modules(node) if not is_near)
        self.modules = set(self._full[module].values()) | set(own)
        interfaces = [parts for name in self.modules if (parts := _interface(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)
        for call in (node for node in self.known if isinstance(node, ast.Call)):
            for function in self.likely_called(call):
                for name, value in self._bound(function, call):
                    self._values[function, name].append((value, None))

    def full(self, node: ast.AST) -> str:
        """Return the full name of a function or module: "torch.distributed.barrier", "hvd.rank".

        What belongs to the Horovod interface of a framework begins with "hvd", whoever provides it.
        A name that is assigned another one has the full name of that. "" for what has no name,
        such as the result of a call.
        """
        full = self._named(node.func if isinstance(node, ast.Call) else node, _MOST_NAMES)
        interface = _interface(full)
        if interface is None:
            return full
        return f"{HVD}.{interface[2]}" if interface[2] else HVD

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        return self.full(node).rpartition(".")[2] or last_name(node)

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(f"{module}.".startswith(f"{root}.") for module in self.modules for root in roots)

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in self._parameters.get(self.scope(node), ())

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return what a name or an attribute such as self.rank is assigned as a whole."""
        return [value for value, part in self._parts_of(node) if part is None]

    def origins(self, *nodes: ast.expr | None) -> list[ast.expr]:
        """Return the expressions that names lead to; a name without any stands for itself."""
        found: list[ast.expr] = []
        for node in nodes:
            if node is not None:
                self._follow(node, None, found, set())
        return found

    def makers(self, node: ast.expr) -> list[str]:
        """Return the full names of the functions and classes whose results an expression may be.

        "" stands for what is not known to be the result of a call.
        """
        origins = self.origins(node)
        return [self.full(each) if isinstance(each, ast.Call) else "" for each in origins]

    def is_made_by(self, node: ast.expr, *names: str) -> bool:
        """Return whether an expression may be the result of a call with one of these last words."""
        return any(isinstance(e, ast.Call) and self.last(e) in names for e in self.origins(node))

    def called(self, call: ast.Call) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain."""
        function = call.func
        if isinstance(function, ast.Attribute) and not self._is_of_module(function):
            return self._of_owner(function.value, function.attr)
        found: list[Function] = []
        for each in self._definitions(function):
            found += self._method(each, "__init__") if isinstance(each, ast.ClassDef) else [each]
        return found

    def likely_called(self, call: ast.Call) -> list[Function]:
        """Return the same; for an owner of which nothing is known, the only method of that name."""
        found, function = self.called(call), call.func
        if found or not isinstance(function, ast.Attribute) or self._is_of_import(function):
            return found
        owner, named = function.value, self._methods.get(function.attr, [])
        if len(named) != 1 or path_of(owner) in ("self", "cls") or self._class_of(owner):
            return found
        is_unknown = all(isinstance(e, (ast.Name, ast.Attribute)) for e in self.origins(owner))
        return named if is_unknown else found

    def returned(self, function: Function) -> list[ast.expr]:
        """Return what a function gives back, None left out where it is given without a word."""
        if function not in self._returns:
            own = (node for node in self.own(function) if isinstance(node, ast.Return))
            self._returns[function] = [node.value for node in own if node.value is not None]
        return self._returns[function]

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global):  # comes before what it says is assigned
            self._global.update((self.scope(node), name) for name in node.names)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            kinds = (*SCOPES, ast.ClassDef)
            holder = next(each for each in self.ancestors(node) if isinstance(each, kinds))
            self._defined[holder, node.name].append(node)
            if isinstance(holder, ast.ClassDef) and not isinstance(node, ast.ClassDef):
                self._methods[node.name].append(node)
        elif isinstance(node, ast.arguments):
            given = (each for each in ast.iter_child_nodes(node) if isinstance(each, ast.arg))
            self._parameters[self.parent(node)] = {each.arg for each in given}
        self._full[self.root(node)].update(_imports(node))
        for target, value, part in _assigned(node):
            self._assign(target, value, part)

    def _assign(self, target: ast.expr, value: ast.expr, part: _Part) -> None:
        if isinstance(target, (ast.Tuple, ast.List)) and part is None:
            elements = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            same = len(elements) == len(target.elts)
            for index, each in enumerate(target.elts):
                self._assign(each, elements[index] if same else value, None if same else index)
        elif path := path_of(target):
            is_local = isinstance(target, ast.Name)
            scope = self.scope(target)
            is_own = is_local and (scope, path) not in self._global
            self._values[scope if is_own else self.root(target), path].append((value, part))

    def _bound(self, function: Function, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
        """Yield the values that a call gives to the arguments of a function."""
        positional = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        # Base.__init__(self) names a class, and gives `self` itself.
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        implied = {"cls"} if owner is not None and self._class_of(owner) else {"cls", "self"}
        if isinstance(self.parent(function), ast.ClassDef) and implied & set(positional[:1]):
            positional = positional[1:]
        if not any(isinstance(each, ast.Starred) for each in call.args):
            yield from zip(positional, call.args, strict=False)
        yield from ((each.arg, each.value) for each in call.keywords if each.arg)

    def _named(self, node: ast.AST, depth: int) -> str:
        if not isinstance(node, (ast.Name, ast.Attribute)):
            return ""
        values = self.values(node) if depth else []
        if len(values) == 1 and (full := self._named(values[0], depth - 1)):
            return full
        if isinstance(node, ast.Name):
            return self._full[self.root(node)].get(node.id, node.id)
        base = self._named(node.value, depth)
        return base and f"{base}.{node.attr}"

    def _is_of_import(self, node: ast.expr) -> bool:
        """Return whether something is part of an imported module or class."""
        first, _, rest = (path_of(node) or "").partition(".")
        return bool(rest) and (first in self._full[self.root(node)] or first in self.modules)

    def _is_of_module(self, node: ast.expr) -> bool:
        return self.full(node).rpartition(".")[0] in self.beside or self._is_of_import(node)

    def _definitions(self, node: ast.expr) -> list[_Definition]:
        """Return the functions and classes of the script that a name surely stands for."""
        module, _, name = self.full(node).rpartition(".")
        if module in self.beside:
            return self._defined.get((self.beside[module], name), [])
        if not isinstance(node, ast.Name):
            return []
        scope = self.scope(node)  # Python does not look into the classes around it
        while (scope, node.id) not in self._defined and not isinstance(scope, ast.Module):
            scope = self.scope(scope)
        return self._defined.get((scope, node.id), [])

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the script that a name stands for, if it is one for certain."""
        found = self._definitions(node)
        return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None

    def _of_owner(self, owner: ast.expr, name: str) -> list[Function]:
        if path_of(owner) in ("self", "cls"):
            around = (each for each in self.ancestors(owner) if isinstance(each, ast.ClassDef))
            return self._method(next(around, None), name)
        if known := self._class_of(owner):
            return self._method(known, name)
        found: list[Function] = []
        for origin in self.origins(owner):
            known = self._class_of(origin.func) if isinstance(origin, ast.Call) else None
            if known is not None:
                found += self._method(known, name)
            elif constant(origin) is not None:
                return []
        return list(dict.fromkeys(found))

    def _method(self, owner: ast.ClassDef | None, name: str, depth: int = 0) -> list[Function]:
        """Return a method of a class or of its bases in the script."""
        if owner is None or depth > _MOST_BASES:
            return []
        own = self._defined.get((owner, name), [])
        if functions := [each for each in own if not isinstance(each, ast.ClassDef)]:
            return functions[-1:]  # Python keeps the last one
        found = (self._method(self._class_of(base), name, depth + 1) for base in owner.bases)
        return next((each for each in found if each), [])

    def _parts_of(self, node: ast.AST) -> _Parts:
        if not isinstance(node, ast.Name):
            path = path_of(node)
            return self._values.get((self.root(node), path), []) if path else []
        scope = self.scope(node)
        while (scope, node.id) not in self._values:
            if isinstance(scope, ast.Module):
                full = self._full[self.root(node)].get(node.id, "")
                module, _, name = full.rpartition(".")
                return self._values.get((self.beside.get(module), name), [])
            if node.id in self._parameters[scope]:
                return []
            scope = self.scope(scope)
        return self._values[scope, node.id]

    def _follow(
        self, node: ast.expr, part: _Part, found: list[ast.expr], seen: set[tuple[ast.AST, _Part]]
    ) -> None:
        if (node, part) in seen or len(seen) > _MOST_VALUES:
            return
        seen.add((node, part))
        values = self._parts_of(node) if isinstance(node, (ast.Name, ast.Attribute)) else []
        if isinstance(node, ast.Call):
            values = [(value, None) for value in self._results(node)]
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
        if part is not None and part != _EACH:
            elements = elements[part : part + 1]
        if not elements:
            return [node] if part != _EACH else []
        found: list[ast.expr] = []
        for element in elements:
            self._follow(element, None, found, seen)
        return found

    def _results(self, call: ast.Call) -> list[ast.expr]:
        """Return what the functions of the script give that a call surely runs; [] if unknown."""
        if call in self._asked:  # a function that calls itself
            return []
        self._asked.add(call)
        called = self.called(call)
        self._asked.remove(call)
        found: list[ast.expr] = []
        for function in called:
            own = [value for value in self.returned(function) if constant(value) is not None]
            if not own or function.name == "__init__":
                return []
            found += own
        return found


def _interface(full: str) -> tuple[str, str, str] | None:
    """Return package, framework and what follows, for a name of a Horovod interface."""
    parts = full.split(".")
    if parts[0] not in _ROOTS or len(parts) < 2 or parts[1] not in _FRAMEWORKS:
        return None
    framework, rest = parts[1], parts[2:]
    if framework == "tensorflow" and rest[:1] == ["keras"]:
        framework, rest = "keras", rest[1:]
    return parts[0], framework, ".".join(rest)


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    if isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from ((alias.asname or alias.name, f"{base}{alias.name}") for alias in node.names)


def modules_of(module: ast.Module) -> list[str]:
    """Return the names of the modules that a module imports, in the order of the text."""
    return [name for node in ast.walk(module) for name, _ in _named_modules(node)]


def _named_modules(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """Yield the modules that a statement imports, and whether it looks for them beside its own."""
    if isinstance(node, ast.Import):
        yield from ((alias.name, False) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module, bool(node.level)


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, _Part]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value, None) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value, None
    elif isinstance(node, (ast.For, ast.comprehension)):
        yield node.target, node.iter, _EACH
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr, None
