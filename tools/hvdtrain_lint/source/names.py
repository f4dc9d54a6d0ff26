"""What a script says of names, of attributes and of what is put into containers."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TypeAlias

from hvdtrain_lint.source.tree import DEFINITIONS, FUNCTIONS, Function, Tree, constant, path_of

HVD = "hvd"
_ROOTS = ("horovod", "hvdtrain")
_FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet")


class Part(Enum):
    """A part of a value that has no number and no name."""

    EACH = "what a loop over it gives"
    ANY = "an element, or a value of a dictionary"
    ENTERED = "what `with` gives"


# Where a part is: the element of this number, the attribute or key of this name, or the elements
# from a number on without so many at the end; and parts of parts.
Selector: TypeAlias = int | str | tuple[int, int] | Part
Path: TypeAlias = tuple[Selector, ...]
Value: TypeAlias = ast.expr | Function | ast.ClassDef
Step: TypeAlias = tuple[Value, Path]
# A name, in the function, class, comprehension or module that holds it.
Place: TypeAlias = tuple[ast.AST | None, str]


# Methods that put their last argument, or parts of it, into what has them.
_ADDING: dict[str, tuple[Part, Path]] = {
    **dict.fromkeys(("append", "appendleft", "add", "insert"), (Part.EACH, ())),
    "extend": (Part.EACH, (Part.EACH,)),
    "update": (Part.ANY, (Part.ANY,)),
}


class Names(Tree):
    """Knows what names are assigned, before anything is followed.

    `modules` holds full names of all that the script imports, `frameworks` those of which it
    imports Horovod's interface, `from_horovod` whether from Horovod.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._imported: dict[ast.AST, dict[str, str]] = defaultdict(dict)
        # What names and attributes are assigned, and what is put into the containers they name.
        self._bound: dict[Place, dict[Step, None]] = defaultdict(dict)
        self._stored: dict[Place, dict[tuple[Selector, Step], None]] = defaultdict(dict)
        self._outside: dict[Place, ast.AST] = {}
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._results: dict[ast.AST, list[tuple[ast.expr, bool]]] = defaultdict(list)
        for node in self.known:
            self._learn(node)
        self.modules = {*self._imported[module].values(), *modules_of(module)}
        interfaces = [parts for name in self.modules if (parts := interface_of(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(f"{module}.".startswith(f"{root}.") for module in self.modules for root in roots)

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in parameters_of(self.scope(node))

    def assigns(self, *names: str) -> bool:
        """Return whether something is assigned to a name or an attribute that is one of these."""
        parts = (part for stored in self._stored.values() for part, _ in stored)
        return any(name in names for _, name in self._bound) or any(p in names for p in parts)

    def _learn(self, node: ast.AST) -> None:
        for name in parameters_of(node):
            self._bound[node, name] = {}  # it hides what is outside
        match node:
            case ast.Global(names) | ast.Nonlocal(names):  # comes before what it names is assigned
                inside = self.scope(node)
                holder = self.root(node) if isinstance(node, ast.Global) else self.scope(inside)
                self._outside.update({(inside, name): holder for name in names})
            case ast.Return(ast.expr() as value) | ast.YieldFrom(value):
                self._results[self.scope(node)].append((value, False))
            case ast.Yield(ast.expr() as value):
                self._results[self.scope(node)].append((value, True))
            case ast.Lambda(_, body):
                self._results[node].append((body, False))
            case ast.FunctionDef(name) | ast.AsyncFunctionDef(name) | ast.ClassDef(name):
                place = self.frame(node), name
                if isinstance(place[0], ast.ClassDef) and isinstance(node, DEFINITIONS):
                    self._methods[name].append(node)
                    self._bound.pop(place, None)  # Python keeps the last one
                self._bound[place][node, ()] = None
            case ast.Call(ast.Attribute(owner, name), [*_, value]) if name in _ADDING:
                part, path = _ADDING[name]
                self._stored[self._site(owner)][part, (value, path)] = None
            case ast.Import(names):
                self._imported[self.root(node)] |= {e.asname: e.name for e in names if e.asname}
            case ast.ImportFrom(module, names):
                full = {e.asname or e.name: f"{module or ''}.{e.name}".strip(".") for e in names}
                self._imported[self.root(node)] |= full
            case ast.Assign(targets, value):
                for target in targets:
                    self._assign(target, value, ())
            case (
                ast.AnnAssign(target, _, ast.expr() as value)
                | ast.AugAssign(target, _, value)
                | ast.NamedExpr(target, value)
            ):
                self._assign(target, value, ())
            case ast.For(target, value) | ast.AsyncFor(target, value):
                self._assign(target, value, (Part.EACH,))
            case ast.comprehension(target, value):
                self._assign(target, value, (Part.EACH,))
            case ast.withitem(value, ast.expr() as target):
                self._assign(target, value, (Part.ENTERED,))

    def _assign(self, target: ast.expr, value: ast.expr, path: Path) -> None:
        match target:
            case ast.Tuple(targets) | ast.List(targets):
                last, after = len(targets) - 1, False
                for index, each in enumerate(targets):
                    if isinstance(each, ast.Starred):
                        after = True
                        self._assign(each.value, value, (*path, (index, last - index)))
                    else:
                        self._assign(each, value, (*path, index - last - 1 if after else index))
            case ast.Name(name):
                is_walrus = isinstance(self.parent(target), ast.NamedExpr)
                frame = self.scope(target) if is_walrus else self.frame(target)
                place = self._outside.get((self.scope(target), name), frame), name
                self._bound[place][value, path] = None
            case ast.Attribute(owner, name) if not self._class_around(owner):
                self._stored[self._text(owner)][name, (value, path)] = None
            case ast.Attribute():
                self._bound[self._site(target)][value, path] = None
            case ast.Subscript(owner, key):
                known = constant(key)
                part = known if known and isinstance(known, (int, str)) else Part.ANY
                self._stored[self._site(owner)][part, (value, path)] = None

    def _site(self, node: ast.expr) -> Place:
        """Return the place of a name, or of an attribute of `self`."""
        if isinstance(node, ast.Attribute) and (around := self._class_around(node.value)):
            return around, node.attr
        if not isinstance(node, ast.Name):
            return self._text(node)
        frame = first = self.frame(node)
        # Python does not look into the classes around a function.
        while not isinstance(frame, ast.Module) and (
            (frame, node.id) not in self._bound
            or (isinstance(frame, ast.ClassDef) and frame is not first)
        ):
            frame = self.frame(frame)
        return frame, node.id

    def _text(self, node: ast.expr) -> Place:
        """Return the place of all that is written alike in a module."""
        return self.root(node), path_of(node) or ""

    def _class_around(self, owner: ast.expr) -> ast.ClassDef | None:
        """Return the class of `self`, `cls` and super()."""
        frame = self.frame(owner, ast.ClassDef)
        is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls", "super")
        return frame if is_own and isinstance(frame, ast.ClassDef) else None


def parameters_of(scope: ast.AST) -> set[str]:
    given = ast.iter_child_nodes(scope.args) if isinstance(scope, FUNCTIONS) else ()
    return {each.arg for each in given if isinstance(each, ast.arg)}


def interface_of(full: str) -> tuple[str, str, list[str]] | None:
    """Return package, framework and what follows, for a name of a Horovod interface."""
    root, framework, *rest = (*full.split("."), "")
    if root not in _ROOTS or framework not in _FRAMEWORKS:
        return None
    if framework == "tensorflow" and rest[0] == "keras":
        framework, *rest = rest
    return root, framework, rest[:-1]


def modules_of(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
