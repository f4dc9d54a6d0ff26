"""Says `match` as `if`, getattr() as an attribute, map() as a loop, and a dataclass's __init__().

So nothing else has to know of these forms.
"""

from __future__ import annotations

import ast
from copy import deepcopy


def simplify(module: ast.Module) -> None:
    """Replace these forms in a module."""
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
