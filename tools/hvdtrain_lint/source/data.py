"""What is known of the samplers and loaders of a script, and of the loops that read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.source.script import Script, keyword
from hvdtrain_lint.source.tree import Scope, last_name, words_in

_EVALUATION = re.compile(
    r"(^|_)(test|tests|testing|val|valid|validation|eval|evaluation|dev)(_|$|set|data|ds|loader)"
    r"|(testset|valset|testloader|valloader|testdata|testsampler)",
    re.IGNORECASE,
)
# They read data for another, or in another form.
_READERS = {"DataLoader", "enumerate", "tqdm", "zip", "iter", "list", "map", "prepare", "cycle"}
# They look at a loader without reading it.
_LOOKING = {
    *("len", "print", "isinstance", "type", "id", "repr", "str", "hasattr", "getattr", "prepare"),
}
_TRAINING = {"backward", "apply_gradients", "minimize", "train_on_batch"}
_NO_GRADIENTS = {"no_grad", "inference_mode"}
_DEEPEST = 8


def evaluates(script: Script, *nodes: ast.expr) -> bool:
    """Return whether data or a loader is for evaluation: by the loops over it, else by names."""
    origins = [script.values.origins(node) for node in nodes]
    read = [each for found in origins for origin in found for each in _readings(script, origin)]
    trained = [_trains(script, each) for each in read]
    if True in trained or False in trained:
        return True not in trained
    named = zip(nodes, origins, strict=True)
    return any(
        _is_for_evaluation(node) or all(_is_for_evaluation(each) for each in found)
        for node, found in named
    )


def _trained(script: Script, made: ast.expr) -> bool:
    return any(_trains(script, each) for each in _readings(script, made))


def is_read_again(script: Script, sampler: ast.Call) -> bool:
    """Return whether a loop reads all that a sampler gives more than once."""
    return any(_repeats(script, each, frozenset()) for each in _readings(script, sampler))


def _readings(script: Script, made: ast.expr) -> list[ast.AST]:
    """Return the loops that read what a call has made, and the calls of other files that may."""
    if script.readings is None:
        script.readings = {}
        for node in script.tree.known:
            for read in _read_by(script, node):
                for each in _sources(script, read, _DEEPEST):
                    script.readings.setdefault(each, []).append(node)
    return script.readings.get(made, [])


def _read_by(script: Script, node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return [node.iter]
    if not isinstance(node, ast.Call) or last_name(node) in _READERS | _LOOKING:
        return []
    if script.methods.called(node) or script.names.last(node)[:1].isupper():
        return []
    return [each for each in node.args if isinstance(each, (ast.Name, ast.Attribute))]


def _sources(script: Script, node: ast.expr, depth: int) -> Iterator[ast.Call]:
    """Yield the calls that make what is read, such as DataLoader() and DistributedSampler()."""
    for origin in script.values.origins(node):
        if isinstance(origin, ast.Call):
            yield origin
            if depth and script.names.last(origin) in _READERS:
                given = [*origin.args, *(each.value for each in origin.keywords)]
                for each in given:
                    yield from _sources(script, each, depth - 1)


def _trains(script: Script, reading: ast.AST) -> bool | None:
    """Return whether a loop trains; False if it surely evaluates, None if that is not seen."""
    if isinstance(reading, (ast.For, ast.AsyncFor)) and _has_step(script, reading):
        return True
    for holder, _ in script.tree.within(reading):
        if isinstance(holder, ast.With):
            names = (last_name(item.context_expr) for item in holder.items)
            if _NO_GRADIENTS.intersection(names):
                return False
    scope = script.tree.scope(reading)
    if isinstance(scope, ast.Module):
        return None
    return False if any(words_in(d) & _NO_GRADIENTS for d in scope.decorator_list) else None


def _has_step(script: Script, loop: ast.For | ast.AsyncFor) -> bool:
    calls = [each for each in ast.walk(loop) if isinstance(each, ast.Call)]
    inside = {function for call in calls for function in script.methods.called(call)}
    for scope in {reached for function in inside for reached in script.calls.reached(function)}:
        calls += [each for each in ast.walk(scope) if isinstance(each, ast.Call)]
    return any(last_name(call) in _TRAINING for call in calls)


def _repeats(script: Script, node: ast.AST, seen: frozenset[Scope]) -> bool:
    """Return whether a node runs several times, in a loop or where its function is called."""
    if any(not _runs_once(loop) for loop in script.tree.loops(node)):
        return True
    scope = script.tree.scope(node)
    if isinstance(scope, ast.Module) or scope in seen:
        return False
    return any(_repeats(script, site, seen | {scope}) for site in script.calls.sites(scope))


def _runs_once(loop: ast.For | ast.While) -> bool:
    if not isinstance(loop, ast.For) or last_name(loop.iter) != "range":
        return False
    bound = loop.iter.args  # type: ignore[attr-defined]
    return len(bound) == 1 and isinstance(bound[0], ast.Constant) and bound[0].value == 1


def _is_for_evaluation(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return bool(_EVALUATION.search(last_name(node)))
    return is_false(keyword(node, "train")) or _is_evaluation_split(keyword(node, "split"))


def rank_samplers(script: Script, *names: str) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that make samplers of these classes, and whether they are for evaluation."""
    for call in script.named(*names):
        data = keyword(call, "dataset", 0)
        target = script.tree.parent(call)
        named = []
        if isinstance(target, ast.Assign):
            named = [last_name(each) for each in target.targets]
        elif isinstance(target, ast.AnnAssign):
            named = [last_name(target.target)]
        evaluated = evaluates(script, call, *([] if data is None else [data]))
        by_name = any(_EVALUATION.search(name) for name in named)
        yield call, evaluated or (by_name and not _trained(script, call))


def train_batch_sizes(script: Script) -> Iterator[ast.expr]:
    """Yield the batch sizes of loaders and fits, without those for evaluation."""
    for call in script.tree.calls:
        last = script.names.last(call)
        if last == "DataLoader":
            data, size = keyword(call, "dataset", 0), keyword(call, "batch_size", 1)
        elif last == "fit" and isinstance(call.func, ast.Attribute):
            data, size = None, keyword(call, "batch_size", 2)
        elif last == "batch" and isinstance(call.func, ast.Attribute):
            data, size = call.func.value, keyword(call, "batch_size", 0)
        else:
            continue
        if size is not None and (data is None or not evaluates(script, data)):
            yield size


def is_every_nth(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is x[rank :: size], of which ranks may get one more or less."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Slice):
        return False
    start, stop, step = node.slice.lower, node.slice.upper, node.slice.step
    if start is None or stop is not None or step is None:
        return False
    return script.ranks.is_rank(start) and script.ranks.is_size(step)


def is_true(node: ast.expr | None) -> bool:
    """Return whether an argument is the word True."""
    return isinstance(node, ast.Constant) and node.value is True


def is_false(node: ast.expr | None) -> bool:
    """Return whether an argument is the word False."""
    return isinstance(node, ast.Constant) and node.value is False


def _is_evaluation_split(node: ast.expr | None) -> bool:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return is_text and bool(_EVALUATION.search(node.value))  # type: ignore[union-attr]
