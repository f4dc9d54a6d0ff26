"""What names stand for: imports, what they are assigned, and which functions calls run."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping
from typing import TypeAlias

from hvdtrain_lint.source.tree import (
    FUNCTIONS,
    NAMES,
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
_Place: TypeAlias = tuple[ast.AST | None, str]


class Values(Tree):
    """Follows values within a script and the modules beside it.

    Values come from imports, assignments, `with`, loops over lists, arguments, and what functions
    of the script return. `modules` holds full names of all that the script imports, `frameworks`
    those of which it imports Horovod's interface, `from_horovod` whether from Horovod.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._full: dict[ast.AST, dict[str, str]] = {m: {} for m in (module, *beside.values())}
        # By the function, class or module that holds a name.
        self._values: dict[_Place, _Parts] = defaultdict(list)
        self._defined: dict[_Place, list[Function | ast.ClassDef]] = defaultdict(list)
        self._global: set[_Place] = set()
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._returned: dict[ast.AST, list[ast.expr]] = defaultdict(list)
        self._asked: set[ast.Call] = set()
        for node in self.known:
            self._learn(node)
        self.modules = {*self._full[module].values(), *modules_of(module)}
        interfaces = [parts for name in self.modules if (parts := _interface(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)
        for call in (node for node in self.known if isinstance(node, ast.Call)):
            for function in self.called(call, or_likely=True):
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
        return ".".join((HVD, *interface[2])) if interface else full

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        return self.full(node).rpartition(".")[2] or last_name(node)

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(f"{module}.".startswith(f"{root}.") for module in self.modules for root in roots)

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in _arguments(self.scope(node))

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return what a name or an attribute such as self.rank is assigned as a whole."""
        return [value for value, part in self._parts_of(node) if part is None]

    def origins(self, *nodes: ast.expr | None) -> list[ast.expr]:
        """Return the expressions that names lead to; a name without any stands for itself."""
        return [each for node in nodes if node for each in self._follow(node, None, set())]

    def behind(self, node: ast.expr) -> list[ast.expr]:
        """Return what a name or a call of the script stands for; nothing where that is itself."""
        return [each for each in self.origins(node) if each is not node]

    def makers(self, node: ast.expr) -> list[str]:
        """Return the full names of the functions and classes whose results an expression may be.

        "" stands for what is not known to be the result of a call. A class of the script has the
        names of its bases.
        """
        origins = self.origins(node)
        calls = [each.func if isinstance(each, ast.Call) else None for each in origins]
        return [name for func in calls for name in (self._kinds(func) if func else [""])]

    def _kinds(self, func: ast.expr, below: tuple[ast.ClassDef, ...] = ()) -> list[str]:
        """Return the full name of a function or class, or those of its bases if it is here."""
        own = [each for each in self._definitions(func) if isinstance(each, ast.ClassDef)]
        if not own or set(own) & set(below):  # a class may have the name of its imported base
            return [self.full(func)]
        pairs = [(base, each) for each in own for base in each.bases]
        names = [name for base, each in pairs for name in self._kinds(base, (*below, each))]
        return names or ["object"]

    def made_by(self, node: ast.expr, *names: str) -> list[ast.Call]:
        """Return the calls with one of these last words whose results an expression may be."""
        calls = (each for each in self.origins(node) if isinstance(each, ast.Call))
        return [call for call in calls if self.last(call) in names]

    def called(self, call: ast.Call, or_likely: bool = False) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain.

        A likely one is the only method of that name, of an owner of which nothing is known.
        """
        found: list[Function] = []
        for each in self._definitions(call.func):
            found += self._method(each, "__init__") if isinstance(each, ast.ClassDef) else [each]
        if found or not isinstance(call.func, ast.Attribute):
            return found
        owner, named = call.func.value, self._methods[call.func.attr]
        found = self._of_owner(owner, call.func.attr)
        first, _, rest = (path_of(call.func) or "").partition(".")
        is_imported = rest and (first in self._full[self.root(call)] or first in self.modules)
        if found or not or_likely or is_imported or len(named) != 1 or self._class_around(owner):
            return found
        return named if all(isinstance(each, NAMES) for each in self.origins(owner)) else []

    def returned(self, function: Function) -> list[ast.expr]:
        """Return what a function gives back, None left out where it is given without a word."""
        return self._returned[function]

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, ast.Global):  # comes before what it says is assigned
            self._global.update((self.scope(node), name) for name in node.names)
        elif isinstance(node, ast.Return) and node.value is not None:
            self._returned[self.scope(node)].append(node.value)
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            kinds = (*SCOPES, ast.ClassDef)
            holder = next(each for each in self.ancestors(node) if isinstance(each, kinds))
            self._defined[holder, node.name].append(node)
            if isinstance(holder, ast.ClassDef) and not isinstance(node, ast.ClassDef):
                self._methods[node.name].append(node)
            for name in _arguments(node):
                self._values.setdefault((node, name), [])  # it hides what is outside
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
            is_own = isinstance(target, ast.Name) and (self.scope(target), path) not in self._global
            scope = self.scope(target) if is_own else self.root(target)
            self._values[scope, path].append((value, part))

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
        if not isinstance(node, NAMES):
            return ""
        values = self.values(node) if depth else []
        if len(values) == 1 and (full := self._named(values[0], depth - 1)):
            return full
        if isinstance(node, ast.Name):
            return self._full[self.root(node)].get(node.id, node.id)
        base = self._named(node.value, depth)
        return base and f"{base}.{node.attr}"

    def _place(self, node: ast.Name, table: Container[_Place]) -> _Place:
        """Return the innermost place around a name that is in a table, else that in its module."""
        scope = self.scope(node)  # Python does not look into the classes around it
        while (scope, node.id) not in table and not isinstance(scope, ast.Module):
            scope = self.scope(scope)
        return scope, node.id

    def _definitions(self, node: ast.expr) -> list[Function | ast.ClassDef]:
        """Return the functions and classes of the script that a name surely stands for."""
        module, _, name = self.full(node).rpartition(".")
        if module in self.beside:
            return self._defined.get((self.beside[module], name), [])
        if not isinstance(node, ast.Name):
            return []
        return self._defined.get(self._place(node, self._defined), [])

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the script that a name stands for, if it is one for certain."""
        found = self._definitions(node)
        return found[0] if len(found) == 1 and isinstance(found[0], ast.ClassDef) else None

    def _class_around(self, owner: ast.expr) -> ast.ClassDef | None:
        """Return the class of `self` and `cls`, and the class that a name stands for."""
        if path_of(owner) not in ("self", "cls"):
            return self._class_of(owner)
        return next((e for e in self.ancestors(owner) if isinstance(e, ast.ClassDef)), None)

    def _of_owner(self, owner: ast.expr, name: str) -> list[Function]:
        if known := self._class_around(owner):
            return self._method(known, name)
        found: list[Function] = []
        for origin in self.origins(owner):
            known = self._class_of(origin.func) if isinstance(origin, ast.Call) else None
            if known is None and constant(origin) is not None:
                return []
            found += self._method(known, name)
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
            return self._values.get((self.root(node), path_of(node) or ""), [])
        place: tuple[ast.AST | None, str] = self._place(node, self._values)
        if place not in self._values:
            module, _, name = self._full[self.root(node)].get(node.id, "").rpartition(".")
            place = self.beside.get(module), name
        return self._values.get(place, [])

    def _follow(
        self, node: ast.expr, part: _Part, seen: set[tuple[ast.AST, _Part]]
    ) -> Iterator[ast.expr]:
        if (node, part) in seen or len(seen) > _MOST_VALUES:
            return
        seen.add((node, part))
        values = self._parts_of(node) if isinstance(node, NAMES) else []
        if isinstance(node, ast.Call):
            values = [(value, None) for value in self._results(node)]
        if not values:
            yield from self._chosen(node, part, seen)
        for value, inner in values:
            if inner is None or part is None:
                yield from self._follow(value, part if inner is None else inner, seen)
            else:
                for each in list(self._follow(value, inner, seen)):
                    yield from self._chosen(each, part, seen)

    def _chosen(
        self, node: ast.expr, part: _Part, seen: set[tuple[ast.AST, _Part]]
    ) -> Iterator[ast.expr]:
        """Yield what a part of an expression leads to; the expression where that is not seen."""
        elements: list[ast.expr] = []
        if part is not None and isinstance(node, (ast.Tuple, ast.List)):
            elements = node.elts
        elif part is not None and isinstance(node, ast.Call) and last_name(node) in _PREPARING:
            elements = node.args
        if part is not None and part != _EACH:
            elements = elements[part : part + 1]
        if not elements and part != _EACH:
            yield node
        for element in elements:
            yield from self._follow(element, None, seen)

    def _results(self, call: ast.Call) -> list[ast.expr]:
        """Return what the functions of the script give back that a call runs; [] if unknown."""
        if call in self._asked:  # a function that calls itself
            return []
        self._asked.add(call)
        called = self.called(call, or_likely=True)
        self._asked.remove(call)
        given = [[v for v in self.returned(f) if constant(v) is not None] for f in called]
        is_known = all(given) and all(function.name != "__init__" for function in called)
        return [value for own in given for value in own] if is_known else []


def _arguments(scope: ast.AST) -> set[str]:
    given = ast.iter_child_nodes(scope.args) if isinstance(scope, FUNCTIONS) else ()
    return {each.arg for each in given if isinstance(each, ast.arg)}


def _interface(full: str) -> tuple[str, str, list[str]] | None:
    """Return package, framework and what follows, for a name of a Horovod interface."""
    root, framework, *rest = (*full.split("."), "")
    if root not in _ROOTS or framework not in _FRAMEWORKS:
        return None
    if framework == "tensorflow" and rest[0] == "keras":
        framework, *rest = rest
    return root, framework, rest[:-1]


def _imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield the names that a statement imports, and their full names."""
    if isinstance(node, ast.Import):
        yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
    elif isinstance(node, ast.ImportFrom):
        base = f"{node.module}." if node.module else ""
        yield from ((alias.asname or alias.name, f"{base}{alias.name}") for alias in node.names)


def modules_of(module: ast.Module) -> Iterator[str]:
    """Yield the names of the modules that a module imports."""
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


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
