"""What expressions stand for, through names, containers, calls, objects and modules."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import TypeAlias

from hvdtrain_lint.source.tree import (
    DEFINITIONS,
    FUNCTIONS,
    NAMES,
    Function,
    Tree,
    constant,
    last_name,
    path_of,
)

HVD = "hvd"
_ROOTS = ("horovod", "hvdtrain")
_FRAMEWORKS = ("torch", "tensorflow", "keras", "mxnet")
_MOST_PARTS, _MOST_BASES, _DEEPEST = 4, 10, 60
# Methods that put their last argument into what has them, and those that put all parts of it.
_ADDING = {"append", "appendleft", "add", "insert"}
_EXTENDING = {"extend", "update"}
# What they give has the parts of what they are given.
_PASSING = {
    *("list", "tuple", "set", "iter", "sorted", "reversed", "cycle", "islice", "chain", "deque"),
    *("tqdm", "filter"),
}


class Part(Enum):
    """A part of a value that has no number and no name."""

    EACH = "what a loop over it gives"
    ANY = "one of its elements, or a value of a dictionary"
    ENTERED = "what `with` gives"


# Parts of parts: the element of this number, the attribute or key of this name, or the elements
# from a number on without so many at the end.
_Selector: TypeAlias = int | str | tuple[int, int] | Part
_Path: TypeAlias = tuple[_Selector, ...]
_Value: TypeAlias = ast.expr | Function | ast.ClassDef
# A part of a value.
_Step: TypeAlias = tuple[_Value, _Path]
# A name, in the function, class, comprehension or module that holds it.
_Place: TypeAlias = tuple[ast.AST | None, str]


class Values(Tree):
    """Follows values within a script and the modules beside it.

    `modules` holds full names of all that the script imports, `frameworks` those of which it
    imports Horovod's interface, `from_horovod` whether from Horovod.
    """

    def __init__(self, module: ast.Module, beside: Mapping[str, ast.Module]) -> None:
        super().__init__(module, beside)
        self._imported: dict[ast.AST, dict[str, str]] = defaultdict(dict)
        self._bound: dict[_Place, dict[_Step, None]] = {}
        self._stored: dict[_Place, dict[tuple[_Selector, _Step], None]] = defaultdict(dict)
        self._outside: dict[_Place, ast.AST] = {}
        self._methods: dict[str, list[Function]] = defaultdict(list)
        self._results: dict[ast.AST, list[tuple[Part | None, ast.expr]]] = defaultdict(list)
        self._ends: dict[_Step, list[_Value]] = {}
        self._full: dict[ast.expr, str] = {}
        self._given: dict[ast.Call, tuple[list[ast.expr], dict[str | None, ast.expr]]] = {}
        self._depth = 0
        for node in self.known:
            self._learn(node)
        self.modules = {*self._imported[module].values(), *modules_of(module)}
        interfaces = [parts for name in self.modules if (parts := _interface(name))]
        self.frameworks = {framework for _, framework, _ in interfaces}
        self.from_horovod = any(root == "horovod" for root, _, _ in interfaces)
        for _ in range(2):  # an argument may be a function that is called
            for call in (node for node in self.known if isinstance(node, ast.Call)):
                self._pass_arguments(call)
            for known in (self._ends, self._full, self._given):
                known.clear()

    def full(self, node: ast.AST) -> str:
        """Return the full name of a function or module: "torch.distributed.barrier", "hvd.rank".

        What belongs to the Horovod interface of a framework begins with "hvd", whoever provides it.
        A name that is assigned another one has the full name of that. "" for what has no name,
        such as the result of a call.
        """
        func = node.func if isinstance(node, ast.Call) else node
        if not isinstance(func, ast.expr):
            return ""
        if func not in self._full:
            full = self._named(func)
            interface = _interface(full)
            self._full[func] = ".".join((HVD, *interface[2])) if interface else full
        return self._full[func]

    def last(self, node: ast.AST) -> str:
        """Return the last word of a function's full name, which `import as` does not change."""
        func: ast.expr = node.func if isinstance(node, ast.Call) else node  # type: ignore[assignment]
        return self.full(func).rpartition(".")[2] or last_name(self._callee(func))

    def owner(self, call: ast.Call) -> ast.expr | None:
        """Return the expression of which a call runs a method; None for a function."""
        func = self._callee(call.func)
        return func.value if isinstance(func, ast.Attribute) else None

    def imports(self, *roots: str) -> bool:
        """Return whether one of these packages, or a part of one, is imported."""
        return any(f"{module}.".startswith(f"{root}.") for module in self.modules for root in roots)

    def is_parameter(self, node: ast.Name) -> bool:
        """Return whether a name is an argument of the function around it."""
        return node.id in _parameters(self.scope(node))

    def values(self, node: ast.AST) -> list[ast.expr]:
        """Return what a name or an attribute such as self.rank is assigned as a whole."""
        steps = [] if not isinstance(node, NAMES) else list(self._bound.get(self._site(node), ()))
        if isinstance(node, ast.NamedExpr):
            steps = [(node.value, ())]
        elif isinstance(node, ast.Attribute):
            steps += self._picked(node.value, (node.attr,))
        return [value for value, path in steps if not path and isinstance(value, ast.expr)]

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
        origins = self.origins(node)
        calls = [each.func if isinstance(each, ast.Call) else None for each in origins]
        return [name for func in calls for name in (self._kinds(func) if func else [""])]

    def made_by(self, node: ast.expr, *names: str) -> list[ast.Call]:
        """Return the calls with one of these last words whose results an expression may be."""
        calls = (each for each in self.origins(node) if isinstance(each, ast.Call))
        return [call for call in calls if self.last(call) in names]

    def called(self, call: ast.Call, or_likely: bool = False) -> list[Function]:
        """Return the functions of the script that a call may run; none if that is not certain.

        A likely one is the only method of that name, of an owner of which nothing is known.
        """
        found: list[Function] = []
        for each in self._functions(call.func):
            own = (
                self._members(each, "__init__") if isinstance(each, ast.ClassDef) else [(each, ())]
            )
            found += [function for function, _ in own if isinstance(function, FUNCTIONS)]
        if found or not or_likely or not isinstance(call.func, ast.Attribute):
            return found
        owner, named = call.func.value, self._methods[call.func.attr]
        first, _, rest = (path_of(call.func) or "").partition(".")
        is_imported = rest and (first in self._imported[self.root(call)] or first in self.modules)
        if is_imported or len(named) != 1 or self._class_around(owner):
            return []
        return named if all(isinstance(each, NAMES) for each in self._follow(owner)) else []

    def given(self, call: ast.Call) -> tuple[list[ast.expr], dict[str | None, ast.expr]]:
        """Return the arguments of a call by position and by name, what is not known under None."""
        if call not in self._given:
            self._given[call] = self._arguments_of(call)
        return self._given[call]

    def _arguments_of(self, call: ast.Call) -> tuple[list[ast.expr], dict[str | None, ast.expr]]:
        positional: list[ast.expr] = []
        named: dict[str | None, ast.expr] = {}
        ends = self._follow(call.func)
        if len(ends) == 1 and isinstance(ends[0], ast.Call) and self.last(ends[0]) == "partial":
            (_, *positional), named = self.given(ends[0])
        for each in call.args:
            known = self._follow(each)
            is_open = isinstance(each, ast.Starred) and len(known) == 1
            is_open = is_open and isinstance(known[0], (ast.Tuple, ast.List))
            positional += known[0].elts if is_open else [each]  # type: ignore[union-attr]
        for argument in call.keywords:
            ends = [] if argument.arg else self._follow(argument.value)
            if len(ends) == 1 and isinstance(ends[0], ast.Dict):
                keys = [constant(key) for key in ends[0].keys]
                named |= {str(k) or None: v for k, v in zip(keys, ends[0].values, strict=True)}
            elif len(ends) == 1 and isinstance(ends[0], ast.Call) and self.last(ends[0]) == "dict":
                named |= self.given(ends[0])[1]
            else:
                named[argument.arg] = argument.value
        return positional, named

    def keyword(self, call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
        """Return an argument by its name, or by its position; None if it is not given."""
        positional, named = self.given(call)
        others = positional[position:][:1] if position is not None else []
        return named.get(name) or next(iter(others), None)

    def arguments(self, call: ast.Call) -> list[ast.expr]:
        """Return all arguments of a call."""
        positional, named = self.given(call)
        return [*positional, *named.values()]

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

    # What the script says of names, before anything is followed.

    def _learn(self, node: ast.AST) -> None:
        if isinstance(node, (ast.Global, ast.Nonlocal)):  # comes before what it says is assigned
            inside = self.scope(node)
            holder = self.root(node) if isinstance(node, ast.Global) else self.scope(inside)
            self._outside.update({(inside, name): holder for name in node.names})
        elif isinstance(node, (ast.Return, ast.YieldFrom)) and node.value is not None:
            self._results[self.scope(node)].append((None, node.value))
        elif isinstance(node, ast.Yield) and node.value is not None:
            self._results[self.scope(node)].append((Part.EACH, node.value))
        elif isinstance(node, ast.Lambda):
            self._results[node].append((None, node.body))
        elif isinstance(node, (*DEFINITIONS, ast.ClassDef)):
            holder = self.frame(node)
            places = self._bound.setdefault((holder, node.name), {})
            if isinstance(holder, ast.ClassDef) and not isinstance(node, ast.ClassDef):
                self._methods[node.name].append(node)
                places.clear()  # Python keeps the last one
            places[node, ()] = None
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            owner, value = node.func.value, node.args[-1]
            if node.func.attr in _ADDING:
                self._stored[self._site(owner)][Part.EACH, (value, ())] = None
            elif node.func.attr in _EXTENDING:
                self._bound.setdefault(self._site(owner), {})[value, ()] = None
        for name in _parameters(node):
            self._bound.setdefault((node, name), {})  # it hides what is outside
        self._imported[self.root(node)].update(_imports(node))
        for target, value, path in _assigned(node):
            self._assign(target, value, path)

    def _assign(self, target: ast.expr, value: ast.expr, path: _Path) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            elements = value.elts if isinstance(value, (ast.Tuple, ast.List)) else []
            count = len(target.elts)
            is_starred = any(isinstance(each, ast.Starred) for each in (*elements, *target.elts))
            after = False
            for index, each in enumerate(target.elts):
                part: _Selector = index - count if after else index
                if isinstance(each, ast.Starred):
                    each, part, after = each.value, (index, count - 1 - index), True
                if len(elements) == count and not is_starred and not path:
                    self._assign(each, elements[index], ())
                else:
                    self._assign(each, value, (*path, part))
        elif isinstance(target, ast.Name):
            is_walrus = isinstance(self.parent(target), ast.NamedExpr)
            frame = self.scope(target) if is_walrus else self.frame(target)
            place = self._outside.get((self.scope(target), target.id), frame), target.id
            self._bound.setdefault(place, {})[value, path] = None
        elif isinstance(target, ast.Attribute) and self._class_around(target.value):
            self._bound.setdefault(self._site(target), {})[value, path] = None
        elif isinstance(target, (ast.Attribute, ast.Subscript)):
            at = (self.root(target), path_of(target.value) or "")
            part = Part.ANY
            if isinstance(target, ast.Attribute):
                part = target.attr
            else:
                at = self._site(target.value)
                if isinstance(key := constant(target.slice), (int, str)) and key != "":
                    part = key
            self._stored[at][part, (value, path)] = None

    def _pass_arguments(self, call: ast.Call) -> None:
        for function in self.called(call, or_likely=True):
            self._bind(function, call)
        for each in self._functions(call.func):
            if isinstance(each, ast.ClassDef) and not self._members(each, "__init__"):
                positional, named = self.given(call)
                values = [*zip(self._fields(each), positional, strict=False), *named.items()]
                for name, value in values:
                    self._bound.setdefault((each, str(name)), {})[value, ()] = None

    def _bind(self, function: Function, call: ast.Call) -> None:
        """Give the arguments of a call to the function that it runs."""
        given, named = self.given(call)
        names = [each.arg for each in (*function.args.posonlyargs, *function.args.args)]
        # Base.__init__(self) names a class, and gives `self` itself.
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        is_class = owner is not None and self._class_of(owner)
        implied = {"cls"} if is_class else {"cls", "self"}
        if isinstance(self.frame(function), ast.ClassDef) and implied & {*names[:1]}:
            names = names[1:]
        wanted = [*names, *(each.arg for each in function.args.kwonlyargs)]
        steps: dict[str, _Step] = {}
        for index, value in enumerate(given):
            if isinstance(value, ast.Starred):
                steps |= {name: (value.value, (i,)) for i, name in enumerate(names[index:])}
                break
            if index < len(names):
                steps[names[index]] = value, ()
            elif function.args.vararg:
                at = function, function.args.vararg.arg
                self._stored[at][index - len(names), (value, ())] = None
        for key, value in named.items():
            if key is None:
                steps |= {name: (value, (name,)) for name in wanted if name not in steps}
            elif key in wanted:
                steps[key] = value, ()
            elif function.args.kwarg:
                self._stored[function, function.args.kwarg.arg][key, (value, ())] = None
        arguments = function.args
        all_names = [*arguments.posonlyargs, *arguments.args][::-1]
        defaults = [*zip(all_names, arguments.defaults[::-1], strict=False)]
        defaults += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        for argument, default in defaults:
            if default is not None and argument.arg not in steps:
                steps[argument.arg] = default, ()
        for name, step in steps.items():
            self._bound.setdefault((function, name), {})[step] = None

    def _fields(self, owner: ast.ClassDef) -> list[str]:
        """Return the fields of a dataclass, in the order of its arguments."""
        bases = [known for base in owner.bases if (known := self._class_of(base))]
        found = [name for base in bases if base is not owner for name in self._fields(base)]
        own = (each.target for each in owner.body if isinstance(each, ast.AnnAssign))
        return [*found, *(each.id for each in own if isinstance(each, ast.Name))]

    # Names and their places.

    def _callee(self, node: ast.expr) -> ast.expr:
        """Return the function or method that an expression leads to, as it is written there."""
        ends = list(self._functions(node))
        is_one = len(ends) == 1 and isinstance(ends[0], NAMES)
        return ends[0] if is_one else node  # type: ignore[return-value]

    def _named(self, node: ast.expr) -> str:
        node = self._callee(node)
        if isinstance(node, ast.Name):
            return self._imported[self.root(node)].get(node.id, node.id)
        base = self._named(node.value) if isinstance(node, ast.Attribute) else ""
        return base and f"{base}.{node.attr}"  # type: ignore[attr-defined]

    def _site(self, node: ast.expr) -> _Place:
        """Return the place of a name, or of an attribute."""
        if isinstance(node, ast.Attribute):
            around = self._class_around(node.value)
            return (around, node.attr) if around else (self.root(node), path_of(node) or "")
        if not isinstance(node, ast.Name):
            return None, ""
        frame = first = self.frame(node)
        # Python does not look into the classes around a function.
        while not isinstance(frame, ast.Module) and (
            (frame, node.id) not in self._bound
            or (isinstance(frame, ast.ClassDef) and frame is not first)
        ):
            frame = self.frame(frame)
        return frame, node.id

    def _class_around(self, owner: ast.AST) -> ast.ClassDef | None:
        """Return the class of `self` and `cls`."""
        is_own = isinstance(owner, ast.Name) and owner.id in ("self", "cls")
        return self._class_with(owner) if is_own else None

    def _class_with(self, node: ast.AST) -> ast.ClassDef | None:
        """Return the class that holds a node."""
        frame = self.frame(node)
        while not isinstance(frame, (ast.ClassDef, ast.Module)):
            frame = self.frame(frame)
        return frame if isinstance(frame, ast.ClassDef) else None

    def _class_of(self, node: ast.expr) -> ast.ClassDef | None:
        """Return the class of the script that a name stands for, if it is one for certain."""
        found = [each for each in self._follow(node) if isinstance(each, ast.ClassDef)]
        return found[0] if len(found) == 1 else None

    def _members(self, owner: ast.ClassDef, name: str, depth: int = 0) -> list[_Step]:
        """Return what an attribute of a class, or of its bases, is assigned."""
        found: list[_Step] = []
        for value, path in self._bound.get((owner, name), ()):
            if isinstance(value, FUNCTIONS) and _is_property(value):
                found += [(each, path) for part, each in self._results[value] if part is None]
            else:
                found.append((value, path))
        for base in owner.bases if not found and depth < _MOST_BASES else ():
            if known := self._class_of(base):
                found += self._members(known, name, depth + 1)
        return found

    # The evaluation.

    def _follow(self, node: _Value, path: _Path = ()) -> list[_Value]:
        """Return what a part of an expression may be: calls, literals, names from elsewhere."""
        at = node, path
        if at in self._ends:
            return self._ends[at]
        if self._depth > _DEEPEST or len(path) > _MOST_PARTS:
            return []
        self._ends[at] = []  # what leads to itself adds nothing
        self._depth += 1
        found = [end for step in self._steps(node, path) for end in self._follow(*step)]
        self._depth -= 1
        # A part of what is made elsewhere stands for what makes it.
        is_made = isinstance(node, ast.Call) and all(isinstance(part, int) for part in path)
        if not found and (not path or is_made):
            found = [node]
        self._ends[at] = list(dict.fromkeys(found))
        return self._ends[at]

    def _steps(self, node: _Value, path: _Path) -> list[_Step]:
        """Return what a part of an expression is a part of, one step nearer to what makes it."""
        first, rest = (path[0], path[1:]) if path else (None, ())
        steps: list[_Step] = []
        if isinstance(node, NAMES):
            steps = [
                (value, inner + path) for value, inner in self._bound.get(self._site(node), ())
            ]
            steps += self._picked(node, path)
            if isinstance(node, ast.Attribute):
                steps.append((node.value, (node.attr, *path)))
            else:
                steps += self._imported_from(node, path)
            if isinstance(first, str) and (around := self._class_around(node)):
                steps += [(value, inner + rest) for value, inner in self._members(around, first)]
        elif isinstance(node, ast.Subscript):
            part = self._selector(node.slice)
            if not isinstance(node.slice, ast.Slice):
                steps = [(node.value, (part, *path))]
            elif path:
                steps = [(node.value, (Part.ANY if isinstance(first, int) else path[0], *rest))]
        elif isinstance(node, ast.IfExp):
            either = (node.body, node.orelse)
            if not all(isinstance(each, ast.Constant) for each in either):  # else it is a flag
                steps = [(each, path) for each in either]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            steps = [(each, path) for each in node.values]
        elif isinstance(node, (ast.NamedExpr, ast.Await, ast.Starred)):
            steps = [(node.value, path)]
        elif isinstance(node, (ast.Tuple, ast.List, ast.Set)) and path:
            steps = _elements(node.elts, path)
        elif isinstance(node, (ast.ListComp, ast.SetComp, ast.GeneratorExp)) and path:
            steps = [(node.elt, rest)]
        elif isinstance(node, ast.DictComp) and path:
            steps = [(node.key if first is Part.EACH else node.value, rest)]
        elif isinstance(node, ast.Dict) and path:
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    steps.append((value, path))
                elif first is Part.EACH:
                    steps.append((key, rest))
                elif first is Part.ANY or constant(key) == first:
                    steps.append((value, rest))
        elif isinstance(node, ast.ClassDef) and isinstance(first, str):
            steps = [(value, inner + rest) for value, inner in self._members(node, first)]
        elif isinstance(node, ast.Call):
            steps = self._of_own(node, path) or self._of_others(node, path)
        return steps or ([(node, rest)] if first is Part.ENTERED else [])

    def _picked(self, node: ast.expr, path: _Path) -> list[_Step]:
        """Return what was put into a container, or assigned to an attribute of an object."""
        if not path:
            return []
        places = dict.fromkeys((self._site(node), (self.root(node), path_of(node) or "")))
        stored = [each for place in places for each in self._stored.get(place, ())]
        return [(v, inner + path[1:]) for part, (v, inner) in stored if _is_part(part, path[0])]

    def _imported_from(self, node: ast.Name, path: _Path) -> list[_Step]:
        """Return what a name of a module beside the script is assigned there."""
        full = self._imported[self.root(node)].get(node.id, node.id)
        steps: list[_Step] = []
        for count in range(len(path) + 1):
            module, _, name = full.rpartition(".")
            if module in self.beside:
                found = self._bound.get((self.beside[module], name), ())
                steps += [(value, inner + path[count:]) for value, inner in found]
            if count < len(path):
                full += f".{path[count]}"
        return steps

    def _selector(self, node: ast.expr) -> _Selector:
        ends = self._follow(node)
        end = ends[0] if len(ends) == 1 else None
        sign = -1 if isinstance(end, ast.UnaryOp) and isinstance(end.op, ast.USub) else 1
        value = constant(end.operand if isinstance(end, ast.UnaryOp) else end)
        if isinstance(value, int) and not isinstance(value, bool):
            return sign * value
        return value if isinstance(value, str) and value else Part.ANY

    def _functions(self, node: ast.expr) -> Iterator[_Value]:
        """Yield what a called expression stands for; what is called in the end for a partial()."""
        for end in self._follow(node):
            if isinstance(end, ast.Call) and end.args and self.last(end) == "partial":
                yield from self._functions(end.args[0])
            else:
                yield end

    def _of_own(self, call: ast.Call, path: _Path) -> list[_Step]:
        """Return what functions of the script give back, or attributes of an instance."""
        first, rest = (path[0], path[1:]) if path else (None, ())
        steps: list[_Step] = []
        for owner in self._functions(call.func):
            if isinstance(owner, ast.ClassDef):
                if first is Part.ENTERED:
                    entering = [value for value, _ in self._members(owner, "__enter__")]
                    steps += [(v, rest) for each in entering for _, v in self._results[each]]
                elif isinstance(first, str):
                    steps += [(v, inner + rest) for v, inner in self._members(owner, first)]
        if isinstance(first, str) and last_name(call) == "super":
            bases = getattr(self._class_with(call), "bases", [])
            known = [each for base in bases if (each := self._class_of(base))]
            found = [step for each in known for step in self._members(each, first)]
            steps += [(value, inner + rest) for value, inner in found]
        for function in self.called(call, or_likely=True):
            for part, value in self._results[function]:
                if part is None and constant(value) is not None:
                    steps.append((value, path))
                elif part and isinstance(first, Part):
                    steps.append((value, rest))
        return steps

    def _of_others(self, call: ast.Call, path: _Path) -> list[_Step]:
        """Return what results of well-known functions are made of."""
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        args = call.args
        match self.last(call), path:
            case (("deepcopy" | "copy"), _) if args or owner:
                return [(args[0] if args else owner, path)]
            case "next", _ if args:
                return [(args[0], (Part.EACH, *path))]
            case (("get" | "pop" | "setdefault"), _) if owner:
                return [(owner, (self._selector(args[0]) if args else Part.ANY, *path))]
            case (("prepare" | "setup"), (int(index), *rest)) if 0 <= index < len(args):
                return [(args[index], tuple(rest))]
            case (("prepare" | "setup"), _) if len(args) == 1:
                return [(args[0], path)]
            case "enumerate", (Part.EACH, 1, *rest) if args:
                return [(args[0], (Part.EACH, *rest))]
            case "zip", (Part.EACH, int(index), *rest) if 0 <= index < len(args):
                return [(args[index], (Part.EACH, *rest))]
            case "items", (Part.EACH, 1, *rest) if owner:
                return [(owner, (Part.ANY, *rest))]
            case "values", (Part.EACH, *rest) if owner:
                return [(owner, (Part.ANY, *rest))]
            case name, (Part() | int() as part, *rest) if name in _PASSING:
                part = Part.ANY if isinstance(part, int) and name != "list" else part
                return [(each, (part, *rest)) for each in args]
            case _, (str(name), *rest) if value := self.keyword(call, name):
                return [(value, tuple(rest))]
        return []


def _elements(elements: list[ast.expr], path: _Path) -> list[_Step]:
    """Return the elements of a list or tuple that a path leads to."""
    first, rest = path[0], path[1:]
    if isinstance(first, tuple):
        if not rest:
            return []
        elements = elements[first[0] : len(elements) - first[1]]
        first, rest = rest[0], rest[1:]
    if any(isinstance(each, ast.Starred) for each in elements):
        inner = [(each, isinstance(each, ast.Starred)) for each in elements]
        return [(each, (Part.ANY, *rest) if starred else rest) for each, starred in inner]
    if isinstance(first, int):
        return [(each, rest) for each in elements[first:][:1]]
    return [(each, rest) for each in elements] if isinstance(first, Part) else []


def _is_part(part: _Selector, wanted: _Selector) -> bool:
    """Return whether what was stored as a part may be the one that is wanted."""
    if Part.ANY in (part, wanted) or part == wanted:
        return True
    return Part.EACH in (part, wanted) and (isinstance(part, int) or isinstance(wanted, int))


def _is_property(function: Function) -> bool:
    return any("property" in last_name(each) for each in getattr(function, "decorator_list", ()))


def _parameters(scope: ast.AST) -> set[str]:
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


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr, _Path]]:
    if isinstance(node, ast.Assign):
        yield from ((target, node.value, ()) for target in node.targets)
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
        if node.value is not None:
            yield node.target, node.value, ()
    elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        yield node.target, node.iter, (Part.EACH,)
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        yield node.optional_vars, node.context_expr, (Part.ENTERED,)
