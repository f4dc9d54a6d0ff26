"""What is known of the samplers and loaders of a script, and of the loops that read them."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache

from hvdtrain_lint.source.script import Script
from hvdtrain_lint.source.tree import NAMES, calls_in, last_name

_EVALUATION = re.compile(
    r"(?i)(^|_)(test|tests|testing|val|valid|validation|eval|evaluation|dev)(_|$|set|data|ds|loader)"
    r"|(testset|valset|testloader|valloader|testdata|testsampler)"
)
# They read data for another, in the same steps or in others.
WRAPPERS = {"enumerate", "tqdm", "zip", "iter", "list"}
_READERS = {*WRAPPERS, "DataLoader", "prepare", "cycle"}
# They look at a loader without reading it.
_LOOKING = {
    *("len", "print", "isinstance", "type", "id", "repr", "str", "hasattr", "getattr", "prepare"),
}
_TRAINING = {"backward", "apply_gradients", "minimize", "train_on_batch"}
_NO_GRADIENTS = {"no_grad", "inference_mode"}
_SIZE_POSITIONS = {"DataLoader": 1, "fit": 2, "batch": 0}


def evaluates(script: Script, *nodes: ast.expr | None) -> bool:
    """Return whether data or a loader is for evaluation: by the loops over it, else by names."""
    readings = [e for origin in script.origins(*nodes) for e in _readings(script)[origin]]
    trained = {_trains(script, each) for each in readings} - {None}
    if trained:
        return True not in trained
    known = ((node, script.origins(node)) for node in nodes if node)
    return any(
        _is_named_so(script, node) or all(_is_named_so(script, each) for each in origins)
        for node, origins in known
    )


def is_read_again(script: Script, sampler: ast.Call) -> bool:
    """Return whether a loop reads all that a sampler gives more than once."""

    def runs_again(loop: ast.For | ast.While) -> bool:
        return isinstance(loop, ast.While) or ast.unparse(loop.iter) != "range(1)"

    return any(script.repeats(each, runs_again) for each in _readings(script)[sampler])


def rank_samplers(script: Script, *names: str) -> Iterator[tuple[ast.Call, bool]]:
    """Yield the calls that make samplers of these classes, and whether they are for evaluation."""
    for call in script.named(*names):
        holder = script.parent(call)
        targets = getattr(holder, "targets", [getattr(holder, "target", call)])
        by_name = any(_EVALUATION.search(last_name(each)) for each in targets)
        trains = any(_trains(script, each) for each in _readings(script)[call])
        evaluated = evaluates(script, call, script.keyword(call, "dataset", 0))
        yield call, evaluated or (by_name and not trains)


def train_batch_sizes(script: Script) -> Iterator[ast.expr]:
    """Yield the batch sizes of loaders and fits, without those for evaluation."""
    for call in script.named(*_SIZE_POSITIONS):
        last, owner = script.last(call), script.owner(call)
        size = script.keyword(call, "batch_size", _SIZE_POSITIONS[last])
        data = {"DataLoader": script.keyword(call, "dataset", 0), "batch": owner}.get(last)
        if size and (owner or last == "DataLoader") and not (data and evaluates(script, data)):
            yield size


def has_sampler(script: Script, loader: ast.Call) -> bool:
    """Return whether a DataLoader has a sampler of its own, or may have one."""
    given = script.keyword(loader, "sampler", 3) or script.keyword(loader, "batch_sampler", 4)
    return given is not None or script.gives(loader, None)


def is_every_nth(script: Script, node: ast.expr) -> bool:
    """Return whether an expression is x[rank :: size], of which ranks may get one more or less."""
    match node:
        case ast.Subscript(_, ast.Slice(ast.expr() as lower, None, ast.expr() as step)):
            return script.is_rank(lower) and script.is_size(step)
    return False


def reads(
    script: Script, node: ast.expr, through: set[str] = _READERS, most: int = 8
) -> Iterator[ast.expr]:
    """Yield what is read where `node` is, such as DataLoader(), and what that reads itself."""
    for origin in script.origins(node):
        yield origin
        inner: list[ast.expr] = []
        if isinstance(origin, ast.Call) and script.last(origin) in through:
            inner = script.arguments(origin)
        elif isinstance(origin, ast.GeneratorExp):
            inner = [each.iter for each in origin.generators]
        for each in inner if most else ():
            yield from reads(script, each, through, most - 1)


@lru_cache(maxsize=1)
def _readings(script: Script) -> dict[ast.expr, list[ast.AST]]:
    """Return the loops that read what calls have made, and the calls of other files that may."""
    found: dict[ast.expr, list[ast.AST]] = defaultdict(list)
    for node in script.known:
        for read in _read_by(script, node):
            for each in reads(script, read):
                found[each].append(node)
    return found


def _read_by(script: Script, node: ast.AST) -> list[ast.expr]:
    if isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
        return [node.iter]
    if not isinstance(node, ast.Call) or last_name(node) in _READERS | _LOOKING:
        return []
    if script.called(node) or script.last(node)[:1].isupper():
        return []
    return [each for each in node.args if isinstance(each, NAMES)]


def _trains(script: Script, reading: ast.AST) -> bool | None:
    """Return whether a loop trains; False if it surely evaluates, None if that is not seen."""
    calls = calls_in(reading) if isinstance(reading, (ast.For, ast.AsyncFor)) else []
    calls += calls_in(*script.reached(each for call in calls for each in script.called(call)))
    if any(last_name(call) in _TRAINING for call in calls):
        return True
    return False if _NO_GRADIENTS & script.contexts(reading) else None


def _is_named_so(script: Script, node: ast.expr) -> bool:
    if not isinstance(node, ast.Call):
        return bool(_EVALUATION.search(last_name(node)))
    split = str(script.option(node, "split"))
    return script.option(node, "train") is False or bool(_EVALUATION.search(split))
