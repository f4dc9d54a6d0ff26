"""What is known of the samplers and loaders of a script, and of the loops that read them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import arguments, calls_in, constant, gives, keyword, last_name

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


def evaluates(script: Script, *nodes: ast.expr | None) -> bool:
    """Return whether data or a loader is for evaluation: by the loops over it, else by names."""
    given = {node: script.origins(node) for node in nodes if node is not None}
    trained = {
        _trains(script, reading)
        for origins in given.values()
        for origin in origins
        for reading in _readings(script, origin)
    }
    if True in trained or False in trained:
        return True not in trained
    return any(
        _is_for_evaluation(node) or all(_is_for_evaluation(each) for each in origins)
        for node, origins in given.items()
    )


def is_read_again(script: Script, sampler: ast.Call) -> bool:
    """Return whether a loop reads all that a sampler gives more than once."""
    return any(script.repeats(each, _runs_again) for each in _readings(script, sampler))


def rank_samplers(script: Script, *names: str) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that make samplers of these classes, and whether they are for evaluation."""
    for call in script.named(*names):
        target = script.parent(call)
        targets: list[ast.expr] = []
        if isinstance(target, ast.Assign):
            targets = target.targets
        elif isinstance(target, ast.AnnAssign):
            targets = [target.target]
        by_name = any(_EVALUATION.search(last_name(each)) for each in targets)
        trains = any(_trains(script, each) for each in _readings(script, call))
        evaluated = evaluates(script, call, keyword(call, "dataset", 0))
        yield call, evaluated or (by_name and not trains)


def train_batch_sizes(script: Script) -> Iterator[ast.expr]:
    """Yield the batch sizes of loaders and fits, without those for evaluation."""
    for call in script.named("DataLoader", "fit", "batch"):
        last, owner = script.last(call), call.func
        if last == "DataLoader":
            data, size = keyword(call, "dataset", 0), keyword(call, "batch_size", 1)
        elif not isinstance(owner, ast.Attribute):
            continue
        elif last == "fit":
            data, size = None, keyword(call, "batch_size", 2)
        else:
            data, size = owner.value, keyword(call, "batch_size", 0)
        if size is not None and (data is None or not evaluates(script, data)):
            yield size


def has_sampler(loader: ast.Call) -> bool:
    """Return whether a DataLoader has a sampler of its own, or may have one."""
    return gives(loader, "sampler", "batch_sampler", None) or len(loader.args) > 2


def is_every_nth(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is x[rank :: size], of which ranks may get one more or less."""
    part = node.slice if isinstance(node, ast.Subscript) else None
    if not isinstance(part, ast.Slice) or part.upper or not part.lower or not part.step:
        return False
    return script.is_rank(part.lower) and script.is_size(part.step)


def _readings(script: Script, made: ast.expr) -> list[ast.AST]:
    """Return the loops that read what a call has made, and the calls of other files that may."""
    if script.readings is None:
        script.readings = {}
        for node in script.known:
            for read in _read_by(script, node):
                for each in _sources(script, read, _DEEPEST):
                    script.readings.setdefault(each, []).append(node)
    return script.readings.get(made, [])


def _read_by(script: Script, node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return [node.iter]
    if not isinstance(node, ast.Call) or last_name(node) in _READERS | _LOOKING:
        return []
    if script.called(node) or script.last(node)[:1].isupper():
        return []
    return [each for each in node.args if isinstance(each, (ast.Name, ast.Attribute))]


def _sources(script: Script, node: ast.expr, depth: int) -> Iterator[ast.Call]:
    """Yield the calls that make what is read, such as DataLoader() and DistributedSampler()."""
    for origin in script.origins(node):
        if isinstance(origin, ast.Call):
            yield origin
            if depth and script.last(origin) in _READERS:
                for each in arguments(origin):
                    yield from _sources(script, each, depth - 1)


def _trains(script: Script, reading: ast.AST) -> bool | None:
    """Return whether a loop trains; False if it surely evaluates, None if that is not seen."""
    if isinstance(reading, (ast.For, ast.AsyncFor)):
        calls = calls_in(reading)
        inside = [function for call in calls for function in script.called(call)]
        calls += calls_in(*script.reached(inside))
        if any(last_name(call) in _TRAINING for call in calls):
            return True
    around = [holder for holder, _ in script.within(reading) if isinstance(holder, ast.With)]
    contexts = {last_name(item.context_expr) for holder in around for item in holder.items}
    return False if _NO_GRADIENTS & (contexts | script.decorators(reading)) else None


def _runs_again(loop: ast.For | ast.While) -> bool:
    if not isinstance(loop, ast.For) or last_name(loop.iter) != "range":
        return True
    bound = arguments(loop.iter) if isinstance(loop.iter, ast.Call) else []
    return len(bound) != 1 or constant(bound[0]) != 1


def _is_for_evaluation(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return bool(_EVALUATION.search(last_name(node)))
    split = constant(keyword(node, "split"))
    return constant(keyword(node, "train")) is False or bool(_EVALUATION.search(str(split)))
