"""Runs a program, on one process for all ranks' rows and on each rank for its own.

A program is plain data: what is left out of it is the simplest, so that any part can be left out.
"""

from __future__ import annotations

import copy
import gc
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from program_values import compare, digest, failure
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import hvdtrain.torch as hvd

Spec = dict[str, Any]
WIDTH, TOKENS = 8, 6
DTYPES = {"f64": torch.float64, "f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
BOUNDS = {"f64": 1e-9, "f32": 2e-4, "bf16": 0.1, "f16": 0.02}
WORLD = {"ENGINE": "mpi", "BUCKET_BYTES": 600, "SHARED_MEMORY": 1, "TORCH_ALLOCATOR": 1}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, weight_decay=0.1),
    # eps is far above what rounding leaves of a gradient that is 0.
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, eps=0.01, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=0.01, weight_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=0.01, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05),
    "sparse_adam": lambda p: torch.optim.SparseAdam(p, lr=0.01, eps=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
    "wolfe": lambda p: torch.optim.LBFGS(p, max_iter=2, line_search_fn="strong_wolfe"),
}


class Layer(nn.Module):
    """One layer of a kind, from rows [n, WIDTH] and tokens [n] to what it adds to the rows."""

    def __init__(self, spec: Spec, earlier: Sequence[Layer], sparse: bool) -> None:
        super().__init__()
        self.kind = kind = spec.get("kind", "linear")
        self.spec, self.dtype = spec, DTYPES[spec.get("dtype", "f64")]
        make: dict[str, Callable[[], nn.Module]] = {
            "embedding": lambda: nn.Embedding(TOKENS, WIDTH, sparse=sparse),
            "conv": lambda: nn.Conv2d(2, 2, 3, padding=1),
            "complex": lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.complex128),
            "scalar": lambda: nn.ParameterList([torch.ones(()), torch.ones(0)]),
            "normed": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            "lazy": lambda: nn.LazyLinear(WIDTH),
            "gru": lambda: nn.GRU(WIDTH // 2, WIDTH, batch_first=True),
            "layernorm": lambda: nn.LayerNorm(WIDTH),
            "batchnorm": lambda: nn.BatchNorm1d(WIDTH),
        }
        self.inner: Any = make.get(
            kind, lambda: nn.Linear(WIDTH, WIDTH, bias=spec.get("bias", True))
        )()
        if kind == "conv":
            weight: Any = self.inner.weight
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        if kind == "lazy":
            self.inner(torch.zeros(1, WIDTH))
        if kind != "complex":
            self.inner.to(self.dtype)
        if kind == "tied":
            for other in earlier:
                plain = type(other.inner) is nn.Linear and other.kind != "complex"
                if plain and other.dtype == self.dtype:
                    self.inner.weight = other.inner.weight
                    break
        if kind == "frozen":
            self.inner.weight.requires_grad_(False)
        self.call: Any = self.inner.forward
        if spec.get("compiled"):
            self.call = torch.compile(self.call, backend="aot_eager", dynamic=True)

    def forward(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        if self.spec.get("checkpoint"):
            again = self.spec["checkpoint"] == "reentrant"
            return checkpoint(self._once, rows, tokens, use_reentrant=again)
        return self._once(rows, tokens)

    def _once(self, rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        kind, inner = self.kind, self.inner
        for _ in range(self.spec.get("times", 1)):
            x = rows.to(torch.complex128 if kind == "complex" else self.dtype)
            if kind == "embedding":
                y = inner(tokens)
            elif kind == "conv":
                y = self.call(x.view(-1, 2, 2, 2).contiguous(memory_format=torch.channels_last))
            elif kind == "scalar":
                y = x * inner[0] + inner[1].sum()
            elif kind == "gru":
                y = inner(x.view(-1, 2, WIDTH // 2))[1][0]
            else:
                y = self.call(x)
            rows = torch.tanh((y.real if kind == "complex" else y).double().reshape(-1, WIDTH))
        return rows


class Net(nn.Module):
    """The layers of a program, of which some ranks do not use some."""

    def __init__(self, program: Spec, alone: bool) -> None:
        super().__init__()
        layers: list[Layer] = []
        for spec in program.get("layers", [{}]):
            sparse = spec.get("sparse", False) and not (alone and program.get("sparse_as_dense"))
            layers.append(Layer(spec, layers, sparse))
        self.layers: Any = nn.ModuleList(layers)

    def forward(self, rows: list[torch.Tensor], tokens: list[torch.Tensor], use: Any) -> Any:
        for layer in self.layers:
            if layer.kind == "unused":
                continue
            if layer.kind == "batchnorm":  # of all ranks' rows together
                parts = torch.tanh(layer.inner(torch.cat(rows))).split([len(r) for r in rows])
                rows = [r + part for r, part in zip(rows, parts, strict=True)]
                continue
            rows = [
                r + 0.5 * layer(r, t) if use(layer.spec, place) else r
                for place, (r, t) in enumerate(zip(rows, tokens, strict=True))
            ]
        return rows


class Training:
    def __init__(
        self, program: Spec, parts: list[int], members: list[int], process_set: Any = None
    ) -> None:
        self.program, self.parts, self.members = program, parts, members
        self.set, self.together = process_set, process_set is not None
        self.passes = program.get("passes", 1)
        self.sharded = program.get("sharded", False)
        self.mode = program.get("mode", "weight")
        self.net = Net(program, alone=not self.together)
        generator = torch.Generator().manual_seed(hvd.rank() if self.together else 0)
        with torch.no_grad():
            for p in self.net.parameters():
                p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        if self.together:
            hvd.broadcast_parameters(self.net.state_dict())
            for layer in self.net.layers:
                if layer.kind == "batchnorm":
                    inner = hvd.SyncBatchNorm(WIDTH).double()
                    inner.load_state_dict(layer.inner.state_dict())
                    layer.inner = inner
        self._hook("before")
        self.former: list[Any] = []
        self._begin_phase()
        self._hook("after")
        kind = program.get("average")
        how = get_ema_multi_avg_fn(0.9) if kind == "exponential" else None
        self.average = AveragedModel(self.net, multi_avg_fn=how) if kind else None
        self.scaler = torch.amp.GradScaler("cpu", 256.0, growth_interval=2)

    def _begin_phase(self) -> None:
        """Make new optimizers, while the program still has those before."""
        self.optimizers = self._optimizers()
        self.former.append(self.optimizers)
        # Steps with the gradients of the first one, too.
        first = self.optimizers[:1] if self.program.get("overlap") == "plain" else []
        self.plain = [torch.optim.SGD(_parameters(o), lr=0.01) for o in first]
        gamma = self.program.get("scheduler")
        make = torch.optim.lr_scheduler.StepLR
        self.schedulers = [make(o, 1, gamma) for o in self.optimizers if gamma]

    def _optimizers(self) -> list[Any]:
        specs = self.program.get("optimizers", ["sgd"])
        taken: set[int] = set()
        owned: list[list[torch.Tensor]] = [[] for _ in specs]
        for number, layer in enumerate(self.net.layers):
            for p in layer.parameters():
                if id(p) not in taken and not layer.spec.get("late"):
                    taken.add(id(p))
                    owned[layer.spec.get("optimizer", number) % len(specs)].append(p)
        if self.program.get("overlap") == "wrapped" and len(specs) > 1:
            owned[-1].extend(owned[0][:1])
        made = [OPTIMIZERS[s](p) for s, p in zip(specs, owned, strict=True) if p]
        return [self._wrap(optimizer) for optimizer in made]

    def _wrap(self, optimizer: torch.optim.Optimizer) -> Any:
        if "pre_hook" in self.program:
            limit = self.program["pre_hook"]
            optimizer.register_step_pre_hook(lambda o, *_: clip_values(_parameters(o), limit))
        if not self.together:
            return optimizer
        get = self.program.get
        named = self.net.named_parameters() if get("named") else None
        return hvd.DistributedOptimizer(
            optimizer,
            named,
            op=hvd.Sum if self.mode == "sum" else hvd.Average,
            backward_passes_per_step=self.passes,
            gradient_predivide_factor=get("predivide", 1.0),
            groups=get("groups"),
            sparse_as_dense=get("sparse_as_dense", False),
            process_set=self.set,
            exchange=get("exchange"),
            sharded=self.sharded,
        )

    def _hook(self, when: str) -> None:
        for layer in self.net.layers:
            p: Any = next((p for p in layer.parameters() if p.requires_grad), None)
            for kind in layer.spec.get(f"hooks_{when}", []) if p is not None else []:
                if kind == "tensor":
                    p.register_hook(lambda g: g * 0.5)
                else:
                    p.register_post_accumulate_grad_hook(_halve)

    def counts(self, step: Spec, rank: int) -> list[int]:
        """Return how many rows a rank has in each backward pass of a step."""
        rows = step.get("rows") or [2]
        return [rows[(rank + number) % len(rows)] for number in range(self.passes)]

    def loss(self, step: Spec, number: int, active: list[int]) -> torch.Tensor | None:
        """Return the loss of one backward pass; None without rows."""
        rows, tokens, targets, factors = [], [], [], []
        ranks = [r for r in self.parts if r in active and self.counts(step, r)[number]]
        total = sum(sum(self.counts(step, r)) for r in self.members if r in active)
        if total == 0:
            raise ValueError("no rank has rows")
        for r in ranks:
            count = self.counts(step, r)[number]
            seed = step.get("seed", 0) * 100 + number * 10 + r
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randn(2, count, WIDTH, generator=generator, dtype=torch.float64)
            rows.append(drawn[0].requires_grad_())
            targets.append(drawn[1])
            tokens.append(torch.randint(0, TOKENS, (count,), generator=generator))
            factor = 1 / total
            if self.together and self.mode == "weight":
                factor = 1 / sum(self.counts(step, r))
            elif self.together and self.mode == "average":
                factor = len(self.members) / total
            factors.append(factor * (float("inf") if step.get("overflow") == r + 1 else 1))
        if not ranks:
            return None
        place = step.get("seed", 0)

        def use(spec: Spec, index: int) -> bool:
            on = spec.get("ranks", [1])[ranks[index] % len(spec.get("ranks", [1]))]
            at = spec.get("steps", [1])[place % len(spec.get("steps", [1]))]
            return bool(on and at)

        loss = torch.zeros((), dtype=torch.float64)
        results = self.net(rows, tokens, use)
        for x, y, target, factor in zip(rows, results, targets, factors, strict=True):
            part = (y - target).square().mean(1).sum()
            if "penalty" in step:
                (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
                part = part + step["penalty"] * slope.square().sum()
            loss = loss + factor * part
        return loss

    def backward(self, step: Spec, active: list[int]) -> torch.Tensor:
        loss, sum_ = None, torch.zeros((), dtype=torch.float64)
        for number in range(self.passes):
            again = step.get("retain") and number % 2 == 1
            loss = loss if again else self.loss(step, number, active)
            if loss is None:
                self.scaler.scale(sum_)  # which has to know its scale on each rank
                continue
            sum_ += loss.detach()
            if step.get("peek"):
                wanted = [p for p in self.net.parameters() if p.requires_grad]
                torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
            scaled = self.scaler.scale(loss) if self.program.get("scaler") else loss
            retain = bool(step.get("retain")) and number % 2 == 0
            scaled.backward(retain_graph=retain or None, create_graph=step.get("graph", False))
        return sum_

    def zero(self, how: str) -> None:
        for optimizer in self.optimizers:
            if how in ("none", "zeros"):
                optimizer.zero_grad(set_to_none=how == "none")
            elif how == "by hand":
                for p in _parameters(optimizer):
                    p.grad = None

    def step(self, step: Spec, active: list[int]) -> None:
        for event in step.get("before", []):
            self.event(event)
        for optimizer in self.optimizers:
            if self.together and self.mode == "weight":
                optimizer.sample_weight = sum(self.counts(step, hvd.rank()))
        how = step.get("zero", "none")
        if step.get("closure") and not self.program.get("scaler"):
            first, *others = self.optimizers

            def closure() -> torch.Tensor:
                self.zero(how)
                return self.backward(step, active)

            first.step(closure)
            for optimizer in others:
                optimizer.step()
            return
        self.zero(how)
        self.backward(step, active)
        sync = self.together and step.get("sync", False)
        if sync:
            for optimizer in self.optimizers:
                optimizer.synchronize()
        if step.get("skip"):
            if self.sharded:  # whose state is not asked for before step() or zero_grad()
                self.zero("none")
            return
        # Scalers refuse optimizers without gradients.
        scaled = [o for o in self.optimizers if self.program.get("scaler") and _gradients(o)]
        for optimizer in scaled:
            self.scaler.unscale_(optimizer)
        self.clip(step.get("clip"))
        for optimizer in self.plain:
            optimizer.step()
        for optimizer in self.optimizers:
            take = partial_step(self.scaler, optimizer, optimizer in scaled)
            if sync:
                with optimizer.skip_synchronize():
                    take()
            else:
                take()
        if scaled:
            self.scaler.update()
        for scheduler in self.schedulers:
            scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.net)

    def clip(self, kind: str | None) -> None:
        limit = 0.05
        parameters = [p for o in self.optimizers for p in _parameters(o)]
        if kind == "own":
            for optimizer in self.optimizers:
                if self.together:
                    optimizer.clip_grad_norm_(limit)
                else:
                    nn.utils.clip_grad_norm_(_parameters(optimizer), limit)
        elif kind == "value":
            clip_values(parameters, limit / 10)
        elif kind is not None:
            nn.utils.clip_grad_norm_(parameters, limit, norm_type=float(kind))

    def event(self, event: Spec) -> None:
        kind = event.get("kind", "nothing")
        layers = self.net.layers
        layer = layers[event.get("layer", 0) % len(layers)]
        if kind == "freeze":
            for p in layer.parameters():
                p.requires_grad_(False)
                p.grad = None
        elif kind == "add":
            known = {id(p) for o in self.optimizers for p in _parameters(o)}
            late = [p for other in layers for p in other.parameters() if id(p) not in known]
            for p in late:
                p.grad = None
            if late:
                self.optimizers[-1].add_param_group({"params": late, "lr": 0.02})
        elif kind == "reload":
            for optimizer in self.optimizers:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        elif kind == "rate":
            for optimizer in self.optimizers:
                for group in optimizer.param_groups:
                    group["lr"] *= 0.5
        elif kind == "model":
            self.net.load_state_dict(copy.deepcopy(self.net.state_dict()))
        elif kind == "broadcast" and self.together and len(self.members) == hvd.size():
            hvd.broadcast_parameters(self.net.state_dict())
            for optimizer in self.optimizers:
                hvd.broadcast_optimizer_state(optimizer)
        elif kind == "wrap":
            self._begin_phase()
        elif kind == "resume":
            states = [copy.deepcopy(o.state_dict()) for o in self.optimizers]
            self._begin_phase()
            for optimizer, state in zip(self.optimizers, states, strict=True):
                if len(state["param_groups"]) == len(optimizer.param_groups):
                    optimizer.load_state_dict(state)
        elif kind == "evaluate" and 0 in self.parts:  # rank 0 alone
            self.net.eval()
            with torch.no_grad():
                zeros = torch.zeros(2, WIDTH, dtype=torch.float64)
                self.net([zeros], [torch.zeros(2, dtype=torch.int64)], lambda *_: True)
            self.net.train()

    def train(self) -> dict[str, Any]:
        steps = self.program.get("steps", [{}])
        for step in steps:
            self.step(step, self.members)
        grads = not (self.sharded or self.program.get("scaler") or steps[-1:] == [])
        grads = grads and "steps=" not in self.program.get("exchange", "")  # each rank has its own
        grads = grads and not any(steps[-1].get(k) for k in ("skip", "closure", "overflow"))
        if "join" in self.program:
            self._join(steps)
            grads = False
        return self._values(grads)

    def _join(self, steps: list[Spec]) -> None:
        """Take further steps, of which each rank has its own number."""
        more = self.program["join"]
        extra = {r: more[r % len(more)] for r in self.members}
        mine = max(extra[r] for r in self.parts)
        for number in range(mine):
            active = [r for r in self.members if extra[r] > number]
            # Unscaling needs all gradients reduced.
            sync = bool(self.program.get("scaler") or self.plain)
            closure = any(isinstance(o, torch.optim.LBFGS) for o in self.optimizers)
            self.step({"seed": 50 + number, "sync": sync, "closure": closure}, active)
        if self.together:
            root = hvd.join()
            hvd.broadcast_parameters(self.net.state_dict(), root)
            for optimizer in self.optimizers:
                hvd.broadcast_optimizer_state(optimizer, root)

    def _values(self, grads: bool) -> dict[str, Any]:
        values = {f"model {k}": _array(v) for k, v in self.net.state_dict().items()}
        if self.average is not None and "join" not in self.program:
            state = self.average.state_dict()
            values |= {f"average {k}": _array(v) for k, v in state.items()}
        for number, optimizer in enumerate(self.optimizers):
            if grads:
                for at, p in enumerate(_parameters(optimizer)):
                    values[f"gradient {number}.{at}"] = _array(p.grad)
            for at, entry in optimizer.state_dict()["state"].items():
                for name, value in entry.items():
                    if isinstance(value, (torch.Tensor, int, float)):
                        values[f"state {number}.{at} {name}"] = _array(torch.as_tensor(value))
        return values


def partial_step(scaler: Any, optimizer: Any, scaled: bool) -> Callable[[], object]:
    return (lambda: scaler.step(optimizer)) if scaled else optimizer.step


def clip_values(parameters: list[torch.Tensor], limit: float) -> None:
    if any(p.grad is not None for p in parameters):
        nn.utils.clip_grad_value_(parameters, limit)


def _halve(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad for p in _parameters(optimizer) if p.grad is not None]


def _array(tensor: torch.Tensor | None) -> Any:
    if tensor is None:
        return None
    tensor = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    if not tensor.is_complex():
        tensor = tensor.double()
    return tensor.contiguous().numpy().copy()


def bound(program: Spec) -> float:
    """Return how far numbers of these types may be from those of one process."""
    types = [spec.get("dtype", "f64") for spec in program.get("layers", [{}])]
    types += ["bf16"] if "bf16" in program.get("exchange", "") else []
    types += ["f16"] if "fp16" in program.get("exchange", "") else []
    return max(BOUNDS[name] for name in types)


def enter(world: dict[str, object]) -> None:
    """Make a world with these settings, if that of the last program has others (collective)."""
    settings = {f"HVDTRAIN_{name}": str(world.get(name, value)) for name, value in WORLD.items()}
    if hvd.is_initialized():
        if all(os.environ[name] == value for name, value in settings.items()):
            return
        hvd.shutdown()
    os.environ.update(settings)
    hvd.init()


def run(program: Spec, rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    chosen = [r for r in program.get("members", range(size)) if r < size] or list(range(size))
    others = [[r] for r in range(size) if r not in chosen]
    try:
        alone = {tuple(g): Training(program, g, g).train() for g in [chosen, *others]}
    except Exception as error:
        return failure(error, "torch") | {"outcome": "invalid"}
    enter(program.get("world", {}))
    try:
        process_set = hvd.global_process_set
        if len(chosen) < size:
            process_set = hvd.add_process_set(chosen)
        group = chosen if rank in chosen else [rank]
        training = Training(program, [rank], group, process_set)
        if rank == program.get("absent"):  # for tests of what finds faults
            return {"outcome": "equal", "difference": 0.0}
        with torch.no_grad():
            next(training.net.parameters()).add_(program.get("wrong", 0.0))
        got = training.train()
        result = compare(alone[tuple(group)], got, bound(program))
        weights = {n: _array(p) for n, p in training.net.named_parameters()}
        result["bits"] = digest(weights) if rank in chosen else None
        del training
        gc.collect()
        if len(chosen) < size:
            hvd.remove_process_set(process_set)
    except Exception as error:
        if program.get("overlap") == "wrapped":  # others may wait for this rank in backward()
            hvd.barrier()
        return failure(error, "torch")
    return result
