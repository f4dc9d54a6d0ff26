"""Draws random programs for torch_programs, of features that real programs have."""

from __future__ import annotations

import random
from typing import Any

Spec = dict[str, Any]
PLAIN = ["sgd", "momentum", "decay", "adam", "amsgrad", "adamw", "rmsprop", "adagrad", "asgd"]
CLOSING = ["lbfgs", "wolfe"]
# On one node they are the plain average; those of weights are that with optimizers that are linear.
GRADIENTS = ["average", "half:type=bf16", "half:type=fp16", "nbit:bits=2", "powersgd:rank=2"]
GRADIENTS += ["topk:ratio=0.1", "nbit:bits=1,warmup=1"]
WEIGHTS = ["local:steps=1,state=average", "postlocal:after=1,steps=1,state=average"]
WEIGHTS += ["diloco:steps=1,rate=1,momentum=0,state=average"]
KINDS = [
    *("linear", "linear", "linear", "tied", "frozen", "unused", "embedding", "embedding", "conv"),
    *("complex", "scalar", "normed", "lazy", "gru", "layernorm", "batchnorm"),
]
EVENTS = ["freeze", "add", "reload", "rate", "model", "broadcast", "evaluate", "wrap", "resume"]


class Draw(random.Random):
    def maybe(self, probability: float) -> bool:
        return self.random() < probability


def draw(seed: int) -> Spec:
    d = Draw(f"{seed}")
    program: Spec = {"layers": [_layer(d) for _ in range(d.randint(1, 5))]}
    layers = program["layers"]
    if not any(layer["kind"] == "linear" for layer in layers):
        layers.insert(0, {"kind": "linear"})
    program["world"] = {
        "ENGINE": "gloo" if d.maybe(0.25) else "mpi",
        "BUCKET_BYTES": d.choice([100, 600, 600, 1 << 20]),
        "SHARED_MEMORY": d.choice([1, 1, 1, 0]),
        "TORCH_ALLOCATOR": d.choice([1, 1, 0]),
    }
    program["mode"] = d.choice(["weight", "weight", "average", "sum"])
    program["named"] = d.maybe(0.5)
    if d.maybe(0.3):
        program["passes"] = d.choice([2, 2, 3])
    program["optimizers"] = [d.choice(PLAIN) for _ in range(d.choice([1, 1, 1, 2, 2, 3]))]
    sharded = program["sharded"] = d.maybe(0.25)
    if d.maybe(0.25) and not sharded:
        program["groups"] = d.choice([1, 2, 3])
    if d.maybe(0.1) and not sharded and program["mode"] != "sum":
        program["predivide"] = 2.0
    elif d.maybe(0.3) and not sharded and program["mode"] != "sum":
        program["exchange"] = d.choice([*GRADIENTS, *WEIGHTS])
    if d.maybe(0.15):
        program["members"] = d.choice([[0, 1], [1, 2], [0, 2], [1]])
    for key, chance, values in (
        ("scheduler", 0.2, [0.5]),
        ("average", 0.15, [True]),
        ("scaler", 0.15, [True]),
        ("sparse_as_dense", 0.5 if sharded else 0.2, [True]),
        ("pre_hook", 0.1, [0.01]),
        ("overlap", 0.08, ["plain", "plain", "plain", "wrapped"]),
    ):
        if d.maybe(chance):
            program[key] = d.choice(values)
    _steps(d, program)
    if d.maybe(0.1) and not sharded:
        program["optimizers"][0] = d.choice(CLOSING)
    if d.maybe(0.25) and not sharded and "members" not in program and "passes" not in program:
        program["join"] = d.choice([[1, 0], [0, 2], [2, 0, 1]])
    _settle(d, program)
    if d.maybe(0.08):
        _compile(program)
    if "average" in program and d.maybe(0.5):
        program["average"] = "exponential"
    return program


def _layer(d: Draw) -> Spec:
    layer: Spec = {"kind": d.choice(KINDS)}
    if layer["kind"] == "embedding" and d.maybe(0.6):
        layer["sparse"] = True
    if d.maybe(0.3) and layer["kind"] not in ("complex", "batchnorm"):
        layer["dtype"] = d.choice(["f32", "f32", "bf16"])
    if d.maybe(0.25):
        layer["ranks"] = d.choice([[1, 0], [0, 1], [1, 0, 0], [0, 0, 1]])
    if d.maybe(0.2):
        layer["steps"] = d.choice([[1, 0], [0, 1], [0, 0, 1]])
    if d.maybe(0.2) and layer["kind"] != "batchnorm":
        layer["checkpoint"] = d.choice(["reentrant", "non-reentrant"])
    if d.maybe(0.15):
        layer["times"] = 2
    for when in ("before", "after"):
        if d.maybe(0.1):
            layer[f"hooks_{when}"] = [d.choice(["tensor", "post"])]
    if d.maybe(0.08):
        layer["late"] = True
    return layer


def _steps(d: Draw, program: Spec) -> None:
    program["steps"] = []
    for number in range(d.randint(1, 4)):
        step: Spec = {"seed": number, "rows": [d.randint(1, 4) for _ in range(d.randint(1, 4))]}
        if d.maybe(0.2):
            step["rows"][d.randrange(len(step["rows"]))] = 0
            step["rows"].append(1)
        step["zero"] = d.choice(["none", "none", "zeros", "by hand", "keep"])
        step["sync"] = d.maybe(0.3)
        if d.maybe(0.3):
            step["clip"] = d.choice(["own", "own", "2", "1", "inf", "value"])
        for key, chance, values in (
            ("closure", 0.1, [True]),
            ("skip", 0.1, [True]),
            ("retain", 0.5 if "passes" in program else 0, [True]),
            ("penalty", 0.1, [0.1]),
            ("graph", 0.05, [True]),
            ("peek", 0.1, [True]),
            ("overflow", 0.3 if "scaler" in program else 0, [1, 2, 3]),
        ):
            if d.maybe(chance):
                step[key] = d.choice(values)
        if number and d.maybe(0.4):
            step["before"] = [{"kind": d.choice(EVENTS), "layer": d.randrange(5)}]
        program["steps"].append(step)


def _compile(program: Spec) -> None:
    """Compile what can be, unless a graph is used twice, which is refused."""
    again = ("penalty", "graph", "retain", "peek")
    if any(key in step for step in program["steps"] for key in again):
        return
    for layer in program["layers"]:
        if layer["kind"] in ("linear", "layernorm", "conv") and "checkpoint" not in layer:
            layer["compiled"] = True


def _partial(program: Spec) -> bool:
    """Return whether a gradient may be missing on some ranks, or come late."""
    layers, steps = program["layers"], program["steps"]
    odd = any(k in layer for k in ("ranks", "steps") for layer in layers)
    odd = odd or any(layer["kind"] in ("tied", "frozen", "unused") for layer in layers)
    odd = odd or any(layer.get("checkpoint") == "reentrant" for layer in layers)
    odd = odd or any(e["kind"] in ("freeze", "add") for s in steps for e in s.get("before", []))
    return odd or any(0 in step["rows"] for step in steps) or "join" in program


def _settle(d: Draw, program: Spec) -> None:
    """Leave out what programs must not do."""
    layers, steps = program["layers"], program["steps"]
    kinds = {layer["kind"] for layer in layers}
    # Sparse gradients are for optimizers that take them.
    if any(layer.get("sparse") for layer in layers):
        if program.get("sharded"):
            program["sparse_as_dense"] = True
        if not program.get("sparse_as_dense"):
            few = [
                name if name in CLOSING else d.choice(["sgd", "adagrad"])
                for name in program["optimizers"]
            ]
            program["optimizers"] = few
            if d.maybe(0.4):
                program["optimizers"] = ["sparse_adam", d.choice(["sgd", "adagrad"])]
                for layer in layers:
                    layer["optimizer"] = 0 if layer.get("sparse") else 1
            # To join is refused: a joined rank has no rows to give.
            _drop([program], "pre_hook", "join")
            _drop(steps, "clip", "peek")
    if "scalar" in kinds:  # torch knows no largest of no elements
        for step in steps:
            if step.get("clip") == "inf":
                step["clip"] = "2"
    if "complex" in kinds:
        if program.get("exchange") in GRADIENTS[3:]:  # which refuse them
            del program["exchange"]
        _drop([program], "pre_hook", "scaler")
        _drop(steps, "overflow")
        _drop([step for step in steps if step.get("clip") == "value"], "clip")
    world = program["world"]
    if program.get("sharded") and (world["ENGINE"] == "gloo" or not world["SHARED_MEMORY"]):
        # Which is refused.
        _drop([layer for layer in layers if layer.get("dtype") == "bf16"], "dtype")
    if "members" in program:  # each rank that is none of them trains alone
        for step in steps:
            step["rows"] = [count or 1 for count in step["rows"]]
    # Batch normalization needs rows on all ranks, and is not differentiated twice.
    if "batchnorm" in kinds:
        _drop([program], "join", "members")
        _drop(steps, "penalty", "graph")
        for step in steps:
            step["rows"] = [count or 1 for count in step["rows"]] + [3]
    reentrant = [layer for layer in layers if layer.get("checkpoint") == "reentrant"]
    if "tied" in kinds:  # which is refused
        for layer in reentrant:
            layer["checkpoint"] = "non-reentrant"
        reentrant = []
    # One process accumulates the gradient of each rank's rows by itself.
    _drop(reentrant, "hooks_before", "hooks_after")
    if reentrant:  # which refuses torch.autograd.grad, and recomputes once
        _drop(steps, "penalty", "peek", "retain", "graph")
    if any(layer.get("checkpoint") for layer in layers):
        _drop(steps, "retain")
    partial = _partial(program)
    program["optimizers"] = program["optimizers"][: len(layers)]
    if any(layer.get("dtype") == "bf16" for layer in layers) or "half" in program.get(
        "exchange", ""
    ):
        # Others divide by the size of gradients, and so make rounding large.
        _limit(program, PLAIN[:3])
    exchange = program.get("exchange", "average")
    if exchange not in GRADIENTS[:3]:  # which is refused
        program.pop("join", None)
    weights = exchange in WEIGHTS
    if weights:  # between which gradients are those of each rank
        _limit(program, PLAIN[: 1 if partial else 3])
        _drop([program], "scaler", "pre_hook")
        _drop(steps, *(("clip", "skip") if partial else ("clip",)))
        for step in steps:
            events = step.get("before", [])
            events[:] = [e for e in events if e["kind"] != "freeze"]  # which is refused
    if "conv" in kinds:  # torch's LBFGS takes no channels_last
        _limit(program, [*PLAIN, "sparse_adam"])
    closing = program["optimizers"][0] in CLOSING
    if closing:
        _drop([program], "scaler", "overlap")
        if partial:  # others cannot tell which of several evaluations this rank has
            del program["optimizers"][1:]
    if program.get("overlap") == "plain" and (weights or "scaler" in program):
        del program["overlap"]
    elif program.get("overlap") == "wrapped":  # which is refused, on ranks that take part
        program["optimizers"] = (program["optimizers"] * 2)[:2]
        program.pop("members", None)
    skipped = False
    # Whether backward() may return before all gradients are reduced: it does while another rank
    # waits for this one in another operation.
    early = partial or program.get("sharded") or len(program["optimizers"]) > 1
    for step in steps:
        # What is not linear needs all gradients reduced.
        nonlinear = ("clip" in step and step["clip"] != "own") or "scaler" in program
        if nonlinear and early:
            step["sync"] = True
        if program.get("sharded") and "pre_hook" in program:
            step["sync"] = True
        # A rank without gradients cannot tell that others skip theirs.
        if step.get("skip") and (partial or program.get("sharded")):
            step["sync"] = True
        if weights or closing:
            step["sync"] = False
        elif program.get("overlap") == "plain":
            step["sync"] = True
        if closing:
            step["closure"] = True
        elif step["sync"]:
            step.pop("closure", None)
        kept = step["zero"] == "keep" and not program.get("sharded") and program["mode"] != "sum"
        kept = kept and not skipped and "scaler" not in program and not weights
        if (step["zero"] == "keep" and not kept) or program.get("sharded"):  # removes gradients
            step["zero"] = "none"
        skipped = step.get("skip", False)
    if partial and (program.get("passes", 1) > 1 or any(s["zero"] == "keep" for s in steps)):
        # Such a hook changes what other passes have left, on the ranks that have this one.
        for layer in layers:
            for when in ("hooks_before", "hooks_after"):
                if "post" in layer.get(when, []):
                    del layer[when]


def _drop(parts: list[Spec], *keys: str) -> None:
    for part in parts:
        for key in keys:
            part.pop(key, None)


def _limit(program: Spec, names: list[str]) -> None:
    """Take other optimizers for those with other names."""
    program["optimizers"] = [n if n in names else "sgd" for n in program["optimizers"]]
