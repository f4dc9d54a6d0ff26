"""The syntax tree of a script, in fewer forms, with all that it assigns to names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import deepcopy
from enum import Enum
from typing import TypeAlias


def simplify(module: ast.Module) -> None:
    """Say `match` as `if`, getattr() as an attribute, map() as a loop, a dataclass's __init__().

    So nothing else has to know of these forms.
    """
    waiting: list[ast.AST] = [module]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.ClassDef):
            _add_init(node)
        for name, field in ast.iter_fields(node):
            if isinstance(field, list):
                field[:] = map(_simpler, field)
            elif isinstance(field, ast.AST):
                setattr(node, name, _simpler(field))
        waiting += ast.iter_child_nodes(node)


def _add_init(owner: ast.ClassDef) -> None:
    fields = [ast.unparse(each.target) for each in owner.body if isinstance(each, ast.AnnAssign)]
    has_init = any(getattr(each, "name", "") == "__init__" for each in owner.body)
    is_tuple = [ast.unparse(base).split(".")[-1] for base in owner.bases] == ["NamedTuple"]
    if fields and (is_tuple or (owner.decorator_list and not owner.bases)) and not has_init:
        lines = [f"def __init__(self, {', '.join(fields)}):", *(f" self.{e} = {e}" for e in fields)]
        owner.body += ast.parse("\n".join(lines)).body
        for node in ast.walk(owner.body[-1]):
            ast.copy_location(node, owner)


def _simpler(node: object) -> object:
    if isinstance(node, ast.Match):
        found = _as_if(node.subject, node.cases)
        whole = found[0] if len(found) == 1 else ast.If(ast.Constant(True), found, [])
        return ast.fix_missing_locations(ast.copy_location(whole, node))
    match node:
        case ast.Call(ast.Name("getattr"), [owner, ast.Constant(name)], []):
            return ast.copy_location(ast.Attribute(owner, str(name), ast.Load()), node)
        case ast.Call(ast.Name("map"), [function, values], []):
            each = ast.comprehension(ast.Name("each", ast.Store()), values, [], 0)
            made = ast.Call(function, [ast.Name("each", ast.Load())], [])
            loop = ast.copy_location(ast.GeneratorExp(made, [each]), node)
            return ast.fix_missing_locations(loop)
    return node


def _as_if(subject: ast.expr, cases: list[ast.match_case]) -> list[ast.stmt]:
    if not cases:
        return []
    first, *others = cases
    tests, names = _tests(first.pattern, subject)
    tests += [first.guard] if first.guard else []
    if not tests:
        return [*names, *first.body]
    found = ast.If(_all(tests), [*names, *first.body], _as_if(subject, others))
    return [ast.copy_location(found, first.pattern)]


def _tests(pattern: ast.pattern, subject: ast.expr) -> tuple[list[ast.expr], list[ast.stmt]]:
    """Return the conditions under which a value has a pattern, and what is assigned then."""
    subject = deepcopy(subject)
    tests: list[ast.expr] = []
    names: list[ast.stmt] = []
    inside: list[tuple[ast.pattern, ast.expr]] = []
    match pattern:
        case ast.MatchValue(value):
            tests = [ast.Compare(subject, [ast.Eq()], [value])]
        case ast.MatchSingleton(value):
            tests = [ast.Compare(subject, [ast.Is()], [ast.Constant(value)])]
        case ast.MatchOr(patterns):
            either = [_tests(each, subject) for each in patterns]
            names = [name for _, given in either for name in given]
            if all(conditions for conditions, _ in either):
                tests = [ast.BoolOp(ast.Or(), [_all(conditions) for conditions, _ in either])]
        case ast.MatchAs(inner, name):
            inside = [(inner, subject)] if inner else []
            names = [ast.Assign([ast.Name(name, ast.Store())], subject)] if name else []
        case ast.MatchSequence(patterns):
            inside = [(e, ast.Subscript(subject, ast.Constant(i))) for i, e in enumerate(patterns)]
            tests = [] if isinstance(subject, ast.Tuple) else [ast.Constant(...)]
        case ast.MatchMapping() | ast.MatchClass():
            tests = [ast.Constant(...)]  # whatever it is, it may fail
    for each, part in inside:
        more, given = _tests(each, part)
        tests, names = tests + more, names + given
    return tests, names


def _all(tests: list[ast.expr]) -> ast.expr:
    return tests[0] if len(tests) == 1 else ast.BoolOp(ast.And(), tests)


Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope: TypeAlias = ast.Module | Function

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (*DEFINITIONS, ast.Lambda)
SCOPES = (*FUNCTIONS, ast.Module)
NAMES = (ast.Name, ast.Attribute)
# They have names of their own.
_FRAMES = (*SCOPES, ast.ClassDef, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

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


class Tree:
    """The nodes of a script, and of the modules beside it that it imports, by their names.

    `nodes` and `calls` are the script's own, in the order of the text; `known` are the nodes of all
    modules. `modules` holds full names of all that the script imports, `frameworks` those of which
    it imports Horovod's interface, `from_horovod` whether from Horovod.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        self.module = module
        self.beside = beside
        for each in (module, *beside.values()):
            simplify(each)
        self.nodes = list(_in_order(module))
        self.calls = [node for node in self.nodes if isinstance(node, ast.Call)]
        self.known = self.nodes + [node for each in beside.values() for node in _in_order(each)]
        self._parents: dict[ast.AST, ast.AST] = {}
        self._frames: dict[ast.AST, ast.AST] = {each: each for each in (module, *beside.values())}
        # What holds a node, and its child that leads there, as within() yields them.
        self._places: dict[ast.AST, tuple[ast.AST, ast.AST]] = {}
        for node in self.known:
            frame = node if isinstance(node, _FRAMES) else self._frames[node]
            # The terms of a long sum are as deep inside one another as there are terms.
            outside = self._places.get(node) if isinstance(node, ast.BinOp) else None
            for child in ast.iter_child_nodes(node):
                self._parents[child] = node
                self._frames[child] = frame
                self._places[child] = outside or (node, child)
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

    def parent(self, node: ast.AST) -> ast.AST | None:
        """Return the node that holds `node`, None for the module."""
        return self._parents.get(node)

    def ancestors(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield what holds `node`, nearest first, up to the module."""
        found = self.parent(node)
        while found is not None:
            yield found
            found = self.parent(found)

    def frame(self, node: ast.AST, *kinds: type[ast.AST]) -> ast.AST:
        """Return the function, class, comprehension or module in which names of `node` are.

        With kinds, the nearest one around it of these kinds, the module if there is none.
        """
        found = self._frames[node]
        while kinds and not isinstance(found, (*kinds, ast.Module)):
            found = self._frames[found]
        return found

    def scope(self, node: ast.AST) -> Scope:
        """Return the function whose body holds `node`, or the module."""
        return self.frame(node, *FUNCTIONS)  # type: ignore[return-value]

    def root(self, node: ast.AST) -> ast.AST:
        return self.frame(node, ast.Module)

    def own(self, scope: Scope) -> Iterator[ast.AST]:
        """Yield the nodes of a scope without those of functions inside it."""
        return (node for node in ast.walk(scope) if self.scope(node) is scope)

    def within(self, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
        """Yield pairs of what holds `node` and which of its children leads there, in its scope.

        Sums, products and the like are left out: what they hold runs if they run.
        """
        place = self._places.get(node)
        while place is not None:
            yield place
            holder = place[0]
            place = None if isinstance(holder, SCOPES) else self._places.get(holder)

    def loops(self, node: ast.AST) -> list[ast.For | ast.While]:
        """Return the loops of its own scope that repeat `node`, innermost first."""
        pairs = [(h, c) for h, c in self.within(node) if isinstance(h, (ast.For, ast.While))]
        return [h for h, c in pairs if c not in h.orelse and c is not getattr(h, "iter", None)]

    def before(self, node: ast.AST) -> Iterator[ast.stmt]:
        """Yield the statements of the blocks around `node` that come before it, in its scope."""
        for holder, child in self.within(node):
            for block in blocks(holder):
                if child in block:
                    yield from block[: block.index(child)]

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(f"{module}.".startswith(f"{root}.") for module in self.modules for root in roots)

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


def blocks(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that a node holds."""
    for name in ("body", "orelse", "finalbody"):
        if isinstance(block := getattr(node, name, None), list):
            yield block


def calls_in(*nodes: ast.AST) -> list[ast.Call]:
    return [each for node in nodes for each in ast.walk(node) if isinstance(each, ast.Call)]


def path_of(node: ast.AST | None) -> str | None:
    """Return the text of a name or of attributes of a name, such as "self.rank"; else None."""
    if isinstance(node, ast.Attribute):
        base = path_of(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else None


def last_name(node: ast.AST) -> str:
    """Return the last word of a name, an attribute or a called function; else ""."""
    while isinstance(node, ast.Call):
        node = node.func
    return str(getattr(node, "attr", "") or getattr(node, "id", ""))


def written(call: ast.Call) -> str:
    """Return how a call is written, without its arguments."""
    name = path_of(call.func) or last_name(call)
    return f"{name}()" if name else ast.unparse(ast.Call(call.func, [], []))


def constant(node: ast.AST | None) -> object:
    """Return the value of a constant; "" for what is none."""
    return node.value if isinstance(node, ast.Constant) else ""


def divided(node: ast.AST) -> ast.expr | None:
    """Return what a node divides, x for x = x / y too; None if it is no division."""
    match node:
        case ast.AugAssign(value, ast.Div() | ast.FloorDiv()):
            return value
        case ast.BinOp(value, ast.Div() | ast.FloorDiv()):
            return value
    return None


def words_in(*nodes: ast.AST) -> set[str]:
    """Return all names, attributes and names of arguments in expressions."""
    parts = [each for node in nodes for each in ast.walk(node)]
    named = (each.arg for each in parts if isinstance(each, ast.keyword) and each.arg)
    return {*named, *(last_name(each) for each in parts if isinstance(each, NAMES))}


def _in_order(module: ast.AST) -> Iterator[ast.AST]:
    """Yield a node and all in it, in the order of the text, however deep they are."""
    waiting = [module]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += reversed(list(ast.iter_child_nodes(node)))


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
