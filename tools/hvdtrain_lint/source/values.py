"""What expressions stand for, through names, containers, calls, objects and modules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TypeAlias

from hvdtrain_lint.source.tree import (
    DEFINITIONS,
    FUNCTIONS,
    HVD,
    NAMES,
    Function,
    Part,
    Path,
    Selector,
    Step,
    Tree,
    Value,
    constant,
    interface_of,
    last_name,
    path_of,
)

_Given: TypeAlias = tuple[list[ast.expr], dict[str | None, ast.expr]]
_LONGEST, _DEEPEST, _MOST_VISITS, _MOST_BASES = 3, 30, 100, 10
_TESTS = (ast.Compare, ast.UnaryOp, ast.BoolOp)
# What they give is what they are given, what has them, or has the same parts.
_COPYING = {"copy", "deepcopy", "compile", "float", "int", "bool", "str"}
_KEEPING = {
    *("copy", "clone", "detach", "item", "numpy", "cpu", "cuda", "to", "float", "double", "half"),
    *("eval", "train"),
}
PASSING = {
    *("list", "tuple", "set", "iter", "sorted", "reversed", "cycle", "islice", "chain", "deque"),
    *("tqdm", "filter"),
}


class Values(Tree):
    """Follows values within a script and the modules beside it."""

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._ends: dict[Step, list[Value]] = {}
        self._full: dict[ast.AST, str] = {}
        self._given: dict[ast.Call, _Given] = {}
        self._packed: dict[ast.Call, tuple[ast.Tuple, ast.Dict]] = {}
        self._partial: set[Step] = set()
        self._is_cut = False
        self._depth = self._visits = 0
        for _ in range(2):  # what is given may be a function that is called
            for call in (node for node in self.known if isinstance(node, ast.Call)):
                for function in self.called(call, or_likely=True):
                    self._bind(function, call)
            for known in (self._ends, self._full, self._given):
                known.clear()

    def full(self, node: ast.AST) -> str:
        """Return the full name of a function or module: "torch.distributed.barrier", "hvd.rank".

        What belongs to the Horovod interface of a framework begins with "hvd", whoever provides it.
        A name that is assigned another one has the full name of that. "" for what has no name,
        such as the result of a call.
        """
        func = node.func if isinstance(node, ast.Call) else node
        if func not in self._full:
            full = self._named(func)
            interface = interface_of(full)
            self._full[func] = ".".join((HVD, *interface[2])) if interface else full
        return self._full[func]

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        func = node.func if isinstance(node, ast.Call) else node
        return self.full(func).rpartition(".")[2] or last_name(self._callee(func))

    def owner(self, call: ast.Call) -> ast.expr | None:
        """Return the expression of which a call runs a method; None for a function."""
        return getattr(self._callee(call.func), "value", None)

    def values(self, node: ast.expr) -> list[ast.expr]:
        """Return what an expression is assigned, which may lead to more."""
        steps, found = self._steps(node, ()), []
        for value, path in islice(steps, _DEEPEST):  # which grow
            if path:
                steps += self._steps(value, path)
            elif isinstance(value, ast.expr):
                found.append(value)
        return list(dict.fromkeys(found))

    def origins(self, *nodes: ast.expr | None) -> list[ast.expr]:
        """Return the expressions that others lead to; one that leads nowhere stands for itself."""
        found = ((node, end) for node in nodes if node for end in self._follow(node))
        return list(dict.fromkeys(e if isinstance(e, ast.expr) else node for node, e in found))

    def behind(self, node: ast.expr) -> list[ast.expr]:
        """Return what an expression stands for; nothing where that is itself."""
        return [each for each in self.origins(node) if each is not node]

    def makers(self, node: ast.expr) -> list[str]:
        """Return the full names of the functions and classes whose results an expression may be.

        "" stands for what is not known to be the result of a call. A class of the script has the
        names of its bases.
        """
        calls = [e.func if isinstance(e, ast.Call) else None for e in self.origins(node)]
        return [name for func in calls for name in (self._kinds(func) if func else [""])]

    def made_by(self, node: ast.expr | None, *names: str) -> list[ast.Call]:
        """Return the calls with one of these last words whose results an expression may be."""
        calls = (each for each in self.origins(node) if isinstance(each, ast.Call))
        return [call for call in calls if self.last(call) in names]

    def called(self, call: ast.Call, or_likely: bool = False) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain.

        A likely one is the only method of that name, of an owner of which nothing is known.
        """
        found: list[Value] = []
        for each in self._functions(call.func):
            if isinstance(each, ast.ClassDef):
                found += [value for value, _ in self._members(each, "__init__")]
            elif isinstance(each, ast.Call):
                found += self._follow(each, ("__call__",))
            else:
                found.append(each)
        functions = [each for each in found if isinstance(each, FUNCTIONS)]
        if functions or not or_likely or not isinstance(call.func, ast.Attribute):
            return functions
        owner, named = call.func.value, self._methods[call.func.attr]
        first, _, rest = (path_of(call.func) or "").partition(".")
        is_imported = rest and (first in self._imported[self.root(call)] or first in self.modules)
        if is_imported or len(named) != 1 or self._class_around(owner):
            return []
        return named if all(isinstance(each, NAMES) for each in self._follow(owner)) else []

    def given(self, call: ast.Call) -> _Given:
        """Return the arguments of a call by position and by name, what is not known under None."""
        if call in self._given:
            return self._given[call]
        args: list[ast.expr] = []
        named: dict[str | None, ast.expr] = {}
        self._given[call] = args, named  # for d = dict(**d)
        match self._follow(call.func):
            case [ast.Call() as made] if self.last(made) == "partial":
                args, named = self.given(made)
                args = args[1:]
        for each in call.args:
            match self._follow(each):
                case [ast.Tuple(elements) | ast.List(elements)] if isinstance(each, ast.Starred):
                    args = [*args, *elements]
                case _:
                    args = [*args, each]
        for argument in call.keywords:
            match self._follow(argument.value):
                case [ast.Dict(keys, values)] if not argument.arg:
                    names = [str(constant(key)) or None for key in keys]
                    named = named | dict(zip(names, values, strict=True))
                case [ast.Call() as made] if not argument.arg and self.last(made) == "dict":
                    named = named | self.given(made)[1]
                case _:
                    named = named | {argument.arg: argument.value}
        self._given[call] = args, named
        return args, named

    def keyword(self, call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
        """Return an argument by its name, or by its position; None if it is not given."""
        args, named = self.given(call)
        others = args[position : position + 1] if position is not None else []
        return named.get(name) or next(iter(others), None)

    def option(
        self, call: ast.Call, name: str, position: int | None = None, default: object = ""
    ) -> object:
        """Return the constant that is an argument, "" for what is none, or what is not given."""
        value = self.keyword(call, name, position)
        ends = self.origins(value)
        return default if value is None else constant(ends[0]) if len(ends) == 1 else ""

    def arguments(self, call: ast.Call) -> list[ast.expr]:
        args, named = self.given(call)
        return [*args, *named.values()]

    def gives(self, call: ast.Call, *names: str | None) -> bool:
        """Return whether one of these arguments is given by name; None stands for **arguments."""
        return not self.given(call)[1].keys().isdisjoint(names)

    def _kinds(self, func: ast.expr, below: tuple[ast.ClassDef, ...] = ()) -> list[str]:
        """Return the full name of a function or class, or those of its bases if it is here."""
        own = [each for each in self._functions(func) if isinstance(each, ast.ClassDef)]
        if not own or set(own) & set(below):  # a class may have the name of its imported base
            return [self.full(func)]
        pairs = [(base, each) for each in own for base in each.bases]
        names = [name for base, each in pairs for name in self._kinds(base, (*below, each))]
        return names or ["object"]

    def _callee(self, node: ast.AST) -> ast.AST:
        """Return the function or method that an expression leads to, as it is written there."""
        ends = list(self._functions(node)) if isinstance(node, ast.expr) else []
        return ends[0] if len(ends) == 1 and isinstance(ends[0], NAMES) else node

    def _named(self, node: ast.AST, most: int = 8) -> str:
        node = self._callee(node) if most else node  # x = x.next has no end
        if isinstance(node, ast.Name):
            return self._imported[self.root(node)].get(node.id, node.id)
        base = self._named(node.value, max(most - 1, 0)) if isinstance(node, ast.Attribute) else ""
        return base and f"{base}.{last_name(node)}"

    def _bind(self, function: Function, call: ast.Call) -> None:
        """Give the arguments of a call to the function that it runs."""
        args, named = self.given(call)
        spec = function.args
        names = [each.arg for each in (*spec.posonlyargs, *spec.args)]
        others = [each.arg for each in spec.kwonlyargs]
        defaults = dict(zip(names[::-1], spec.defaults[::-1], strict=False))
        defaults |= {k: v for k, v in zip(others, spec.kw_defaults, strict=True) if v}
        # Base.__init__(self) names a class, and gives `self` itself.
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        implied = {"cls"} if owner is not None and self._class_of(owner) else {"cls", "self"}
        if isinstance(self.frame(function), ast.ClassDef) and implied & {*names[:1]}:
            names = names[1:]
        packed, options = self._packed.setdefault(call, (ast.Tuple([]), ast.Dict([], [])))
        packed.elts, options.values = args, list(named.values())
        options.keys = [ast.Constant(key) if key else None for key in named]
        is_open = any(isinstance(each, ast.Starred) for each in args)
        for index, name in enumerate([*names, *others]):
            steps: list[Step] = [(options, (name,))] if {name, None} & named.keys() else []
            if index < (len(names) if is_open else min(len(args), len(names))):
                steps.append((packed, (index,)))
            if not steps and name in defaults:
                steps = [(defaults[name], ())]
            self._bound[function, name].update(dict.fromkeys(steps))
        if spec.vararg:
            self._bound[function, spec.vararg.arg][packed, ((len(names), 0),)] = None
        if spec.kwarg:
            self._bound[function, spec.kwarg.arg][options, ()] = None

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the script that a name stands for, if it is one for certain."""
        found = [each for each in self._follow(node) if isinstance(each, ast.ClassDef)]
        return found[0] if len(found) == 1 else None

    def _members(self, owner: ast.ClassDef, name: Selector, depth: int = 0) -> list[Step]:
        """Return what an attribute of a class, or of its bases, is assigned."""
        found: list[Step] = []
        for value, path in self._bound.get((owner, str(name)), ()):
            decorators = value.decorator_list if isinstance(value, DEFINITIONS) else []
            if any("property" in last_name(each) for each in decorators):
                found += [(each, path) for each, _ in self._results[value]]
            else:
                found.append((value, path))
        return found or self._inherited(owner, name, depth)

    def _attribute(self, owner: ast.ClassDef, path: Path) -> list[Step]:
        """Return what an attribute of a class or an instance is, or what was put into it."""
        stored = self._stored.get((owner, str(path[0])), ()) if path[1:] else ()
        picked = [step for part, step in stored if _is_part(part, path[1])]
        return _inside(self._members(owner, path[0]), path[1:]) + _inside(picked, path[2:])

    def _inherited(self, owner: ast.ClassDef, name: Selector, depth: int = 0) -> list[Step]:
        bases = [self._class_of(base) for base in owner.bases if depth < _MOST_BASES]
        return [step for base in bases if base for step in self._members(base, name, depth + 1)]

    # Where values come from.

    def _follow(self, node: Value, path: Path = ()) -> list[Value]:
        """Return what a part of an expression may be: calls, literals, names from elsewhere."""
        at = node, path
        if at in self._ends or len(path) > _LONGEST:
            self._is_cut |= at in self._partial
            return self._ends.get(at, [])
        if self._depth > _DEEPEST or self._visits > _MOST_VISITS:
            self._is_cut = True
            return []
        outer, self._is_cut = self._is_cut, False
        self._ends[at] = []  # what leads to itself adds nothing
        self._partial.add(at)
        self._depth += 1
        self._visits += 1
        found = [end for step in self._steps(node, path) for end in self._follow(*step)]
        self._depth -= 1
        # A part of what is made elsewhere stands for what makes it.
        is_made = isinstance(node, ast.Call) and all(isinstance(part, int) for part in path)
        if not found and (not path or is_made) and not (self._is_cut and self._depth):
            found = [node]
        found = self._ends[at] = list(dict.fromkeys(found))
        if not (self._is_cut and self._depth):
            self._partial.discard(at)
        self._is_cut |= outer
        if not self._depth:  # the others have not seen what leads to themselves
            for each in self._partial:
                del self._ends[each]
            self._partial.clear()
            self._is_cut, self._visits = False, 0
        return found

    def _steps(self, node: Value, path: Path) -> list[Step]:
        """Return what a part of an expression is a part of, one step nearer to what makes it."""
        first, rest = (path[0], path[1:]) if path else (None, ())
        steps: list[Step] = []
        match node:
            case ast.Name():
                steps = self._of_name(node, path)
                if isinstance(first, str) and (around := self._class_around(node)):
                    steps += self._attribute(around, path)
            case ast.Attribute(owner, name):
                steps = [*self._picked(node, path), (owner, (name, *path))]
            case ast.Subscript(owner, ast.Slice()) if path:
                steps = [(owner, (Part.ANY if isinstance(first, int) else path[0], *rest))]
            case ast.Subscript(owner, key) if not isinstance(key, ast.Slice):
                steps = [(owner, (self._selector(key), *path))]
            case ast.IfExp(_, one, other):
                is_flag = isinstance(one, ast.Constant) and isinstance(other, ast.Constant)
                steps = [] if is_flag else [(one, path), (other, path)]
            case ast.BoolOp(ast.Or(), values) if not any(isinstance(v, _TESTS) for v in values):
                steps = [(each, path) for each in values]
            case ast.NamedExpr(value=value) | ast.Await(value) | ast.Starred(value):
                steps = [(value, path)]
            case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements) if path:
                steps = _elements(elements, path)
            case ast.ListComp(element) | ast.SetComp(element) | ast.GeneratorExp(element) if path:
                steps = [(element, rest)]
            case ast.DictComp(key, value) if path:
                steps = [(key if first is Part.EACH else value, rest)]
            case ast.Dict(keys, values) if path:
                pairs = [*zip(keys, values, strict=True)]
                steps = [(value, path) for key, value in pairs if key is None]
                if first is Part.EACH:
                    steps += [(key, rest) for key in keys if key]
                else:
                    wanted = [v for k, v in pairs if k and first in (Part.ANY, constant(k))]
                    steps += [(value, rest) for value in wanted]
            case ast.ClassDef() if path:
                steps = self._attribute(node, path)
            case ast.Call():
                steps = self._of_own(node, path) or self._of_others(node, path)
        return steps or ([(node, rest)] if first is Part.ENTERED else [])

    def _of_name(self, node: ast.Name, path: Path) -> list[Step]:
        """Return what a name is assigned, in a module beside the script if it is from there."""
        steps = [*_inside(self._bound.get(self._site(node), ()), path), *self._picked(node, path)]
        full = self._imported[self.root(node)].get(node.id, node.id)
        for count in range(len(path) + 1):
            module, _, name = full.rpartition(".")
            if module in self.beside:
                found = self._bound.get((self.beside[module], name), ())
                steps += _inside(found, path[count:])
            full += f".{path[count]}" if count < len(path) else ""
        return steps

    def _picked(self, node: ast.expr, path: Path) -> list[Step]:
        """Return what was put into a container, or assigned to an attribute of an object."""
        places = dict.fromkeys((self._site(node), self._text(node))) if path else {}
        stored = [each for place in places for each in self._stored.get(place, ())]
        return _inside([step for part, step in stored if _is_part(part, path[0])], path[1:])

    def _selector(self, node: ast.expr) -> Selector:
        match self._follow(node):
            case [ast.Constant(str(value) | int(value))] if not isinstance(value, bool):
                return value
            case [ast.UnaryOp(ast.USub(), ast.Constant(int(value)))]:
                return -value
        return Part.ANY

    def _functions(self, node: ast.expr) -> Iterator[Value]:
        """Yield what a called expression stands for; what is called in the end for a partial()."""
        ends = [*self._follow(node)]
        for end in ends:  # which grow
            if isinstance(end, ast.Call) and end.args and self.last(end) == "partial":
                ends += [each for each in self._follow(end.args[0]) if each not in ends]
            else:
                yield end

    def _of_own(self, call: ast.Call, path: Path) -> list[Step]:
        """Return what functions of the script give back, or attributes of an instance."""
        first, rest = (path[0], path[1:]) if path else (None, ())
        steps: list[Step] = []
        for each in self._functions(call.func):
            if isinstance(each, ast.ClassDef) and first is Part.ENTERED:
                entered = [value for value, _ in self._members(each, "__enter__")]
                steps += [(value, rest) for way in entered for value, _ in self._results[way]]
            elif isinstance(each, ast.ClassDef) and path:
                steps += self._attribute(each, path)
            elif path and isinstance(each, ast.Name) and each.id == "super":
                around = self._class_around(each)
                steps += _inside(self._inherited(around, path[0]), rest) if around else []
        for function in self.called(call, or_likely=True):
            for value, is_yielded in self._results[function]:
                if is_yielded and isinstance(first, Part):
                    steps.append((value, rest))
                elif not is_yielded and constant(value) is not None:
                    steps.append((value, path))
        return steps

    def _of_others(self, call: ast.Call, path: Path) -> list[Step]:
        """Return what results of well-known functions are made of."""
        args, owner = call.args, call.func.value if isinstance(call.func, ast.Attribute) else None
        match self.last(call), path:
            case name, _ if name in _COPYING and args:
                return [(args[0], path)]
            case name, _ if name in _KEEPING and owner:
                return [(owner, path)]
            case "next", _ if args:
                return [(args[0], (Part.EACH, *path))]
            case (("get" | "pop" | "setdefault"), _) if owner:
                return [(owner, (self._selector(args[0]) if args else Part.ANY, *path))]
            case (("prepare" | "setup"), _) if len(args) == 1:
                return [(args[0], path)]
            case (("prepare" | "setup"), (int(), *_)):
                return _elements(args, path)
            case "enumerate", (Part.EACH, 1, *rest) if args:
                return [(args[0], (Part.EACH, *rest))]
            case "zip", (Part.EACH, int(index), *rest):
                return [(each, (Part.EACH, *rest)) for each in args[index : index + 1]]
            case ("items", (Part.EACH, 1, *rest)) | ("values", (Part.EACH, *rest)) if owner:
                return [(owner, (Part.ANY, *rest))]
            case name, (Part() | int() as part, *rest) if name in PASSING:
                part = part if name == "list" or isinstance(part, Part) else Part.ANY
                return [(each, (part, *rest)) for each in args]
            case _, (str(name), *rest) if value := self.keyword(call, name):
                return [(value, tuple(rest))]
        return []


def _inside(steps: Iterable[Step], path: Path) -> list[Step]:
    return [(value, inner + path) for value, inner in steps]


def _elements(elements: list[ast.expr], path: Path) -> list[Step]:
    """Return the elements of a list or tuple that a path leads to."""
    first, rest = path[0], path[1:]
    stars = [index for index, each in enumerate(elements) if isinstance(each, ast.Starred)]
    match first:
        case (start, end):
            part = ast.Tuple(elements[start : len(elements) - end])
            return _elements(part.elts, rest) if rest else [(part, ())]
        case int() if stars and first >= stars[0]:
            return [(elements[stars[0]], (first - stars[0], *rest))]
        case int():
            return [(each, rest) for each in elements[first:][:1]]
        case Part():
            return [(e, path if isinstance(e, ast.Starred) else rest) for e in elements]
    return []


def _is_part(part: Selector, wanted: Selector) -> bool:
    """Return whether what was stored as a part may be the one that is wanted."""
    if Part.ANY in (part, wanted) or part == wanted:
        return True
    return Part.EACH in (part, wanted) and (isinstance(part, int) or isinstance(wanted, int))
