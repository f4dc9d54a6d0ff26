"""An optimizer of which each step is compared with what its exchange makes of the ranks' own."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from exchange_formulas import BlockFormula, DiLoCoFormula, Flat, mean
from torch_training import check_equal

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.auto import AutoExchange
from hvdtrain.core.exchanges.catalog import make_exchange
from hvdtrain.core.exchanges.costs import Chosen
from hvdtrain.core.exchanges.n_bit import NBitExchange
from hvdtrain.core.gradients.exchange import AllreduceExchange, Exchange
from hvdtrain.core.process_set import ProcessSet, global_process_set

# Each exchange of the catalog, so that it acts on matrices of 64 and 32 elements in few steps.
TEXTS = {
    "average": "average", "half": "half:type=bf16", "adasum": "adasum",
    "nbit": "nbit:bits=1,block=8", "powersgd": "powersgd:rank=1,min_rate=0.1",
    "topk": "topk:ratio=0.25", "auto": "auto", "local": "local:steps=2",
    "postlocal": "postlocal:after=2,steps=2", "blockmomentum": "blockmomentum:steps=2",
    "diloco": "diloco:steps=2",
}  # fmt: skip
# Of the results of bfloat16, relative to the largest number.
_TOLERANCES = {"half": 2.0**-7}
_RATE = 0.1

# Returns the weights after an exchange, from those of all ranks, their counts, and whether it is a
# flush.
Rule = Callable[[list[Flat], Sequence[float], bool], Flat]


def exchange_of(name: str, parameters: int, ranks: int) -> Exchange:
    if name != "auto":
        return make_exchange(TEXTS[name])
    codes = NBitExchange(block=8)
    auto = AutoExchange([codes], steps=1)
    methods = [1] + [0] * (parameters - 1)
    auto.load(Chosen.begin(methods, ranks, [AllreduceExchange(), codes]).state())
    return auto


def new_optimizer(
    model: torch.nn.Module,
    exchange: Exchange | str | None,
    momentum: float = 0.9,
    passes: int = 1,
    members: ProcessSet = global_process_set,
) -> hvd.DistributedOptimizer:
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=_RATE, momentum=momentum),
        model.named_parameters(),
        exchange=exchange,
        backward_passes_per_step=passes,
        process_set=members,
    )


class Checked:
    """A model and its optimizer, with plain SGD within.

    All that was applied of the ranks' gradients, and all that they keep, must be the mean of what
    they have given. Weights after an exchange must be those that a formula computes from the
    weights of all ranks before it. After each exchange all ranks must have the same bits.
    """

    def __init__(
        self,
        name: str,
        model: torch.nn.Module,
        passes: int = 1,
        members: ProcessSet = global_process_set,
    ) -> None:
        self.name, self.model, self._members = name, model, members
        self._size = members.size() or 0
        exchange = exchange_of(name, len(list(model.parameters())), self._size)
        self.optimizer = new_optimizer(model, exchange, 0.0, passes, members)
        self._given: dict[str, torch.Tensor] = {}
        self._applied: dict[str, torch.Tensor] = {}
        self._rules: dict[str, Rule] = {}
        self._counts = [0.0] * self._size
        self._own: dict[str, Flat] = {}
        self._share = 1.0
        for parameter_name, parameter in model.named_parameters():
            self.watch(parameter_name, parameter)
        self.optimizer.register_step_pre_hook(lambda *_: self._note_applied())
        self.optimizer.register_step_post_hook(lambda *_: self._note_weights())

    def watch(self, name: str, parameter: torch.nn.Parameter) -> None:
        self._given[name], self._applied[name] = (torch.zeros_like(parameter) for _ in range(2))
        given = self._given[name]

        def note(gradient: torch.Tensor) -> None:
            if not self.optimizer.exchanges_weights:
                given.add_(gradient, alpha=self._share)

        parameter.register_hook(note)
        if self.optimizer.exchanges_weights:
            self._rules[name] = self._rule(parameter)

    def step(
        self, *losses: Callable[[], torch.Tensor], weights: Sequence[float] | None = None
    ) -> None:
        counts = weights or [1.0] * self._size
        own = counts[self._members.rank() or 0]
        self._share = own / sum(counts)
        if weights is not None:
            self.optimizer.sample_weight = own
        if self.optimizer.exchanges_weights and not self._rules:
            named = self.model.named_parameters()
            self._rules = {name: self._rule(parameter) for name, parameter in named}
        self.optimizer.zero_grad()
        for loss in losses:
            loss().backward()
        self.optimizer.step()
        if self._rules:
            self._counts = [a + b for a, b in zip(self._counts, counts, strict=True)]
        if self.optimizer.synchronized:
            self._check_exchange(flush=False)

    def flush(self) -> None:
        drifted = not self.optimizer.synchronized
        self.optimizer.flush()
        if drifted:
            self._check_exchange(flush=True)
        self._check_gradients()

    def _note_applied(self) -> None:
        if not self.optimizer.exchanges_weights:
            for name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    self._applied[name] += parameter.grad.to_dense()

    def _note_weights(self) -> None:
        self._own = {name: _flat(p) for name, p in self.model.named_parameters()}

    def _check_exchange(self, flush: bool) -> None:
        check_equal(self.model.parameters(), self._members)
        if not self._rules:
            return
        of_ranks = hvd.allgather_object(self._own, name="weights", process_set=self._members)
        for name, parameter in self.model.named_parameters():
            expected = self._rules[name]([own[name] for own in of_ranks], self._counts, flush)
            np.testing.assert_allclose(_flat(parameter), expected, rtol=0, atol=1e-11, err_msg=name)
        self._counts = [0.0] * self._size

    def _rule(self, parameter: torch.nn.Parameter) -> Rule:
        start = _flat(parameter)
        if self.name in ("local", "postlocal"):
            return lambda before, counts, flush: mean([[w] for w in before], counts)[0]
        if self.name == "adasum":
            return _adasum_rule(parameter)
        if self.name == "diloco":
            outer = DiLoCoFormula([start], 0.7, 0.9)
            return lambda before, counts, flush: outer.round(
                0, mean([[w] for w in before], counts)[0]
            )
        block = BlockFormula([start], self._size, 1 - 1 / self._size, 1.0, nesterov=True)
        return lambda before, counts, flush: block.block(
            [[w] for w in before], counts, 0.5 if flush else 1.0, flush
        )[0]

    def _check_gradients(self) -> None:
        if self.optimizer.exchanges_weights and self.name != "postlocal":
            return
        kept = self._residuals()
        for name, given in self._given.items():
            whole = hvd.allreduce(given, op=hvd.Sum, name=name, process_set=self._members)
            found = self._applied[name] + kept[name]
            tolerance = _TOLERANCES.get(self.name, 1e-12) * (1 + float(whole.abs().max()))
            assert float((found - whole).abs().max()) < tolerance, (self.name, name)

    def _residuals(self) -> Mapping[str, torch.Tensor]:
        own = self.optimizer.exchange_state()["own"]
        of_ranks = hvd.allgather_object(own, name="residuals", process_set=self._members)
        names = self.optimizer._parameter_names
        found = {}
        for name, parameter in self.model.named_parameters():
            ends = f"residual.{names[parameter]}"
            kept = [a for arrays in of_ranks for key, a in arrays.items() if key.endswith(ends)]
            parts = [torch.from_numpy(array).view_as(parameter) for array in kept]
            found[name] = sum(parts, torch.zeros_like(parameter)) / self._size
        return found


def _adasum_rule(parameter: torch.Tensor) -> Rule:
    start = _flat(parameter)

    def combine(before: list[Flat], counts: Sequence[float], flush: bool) -> Flat:
        one, other = (w - start for w in before)
        dot = one @ other
        a, b = (1 - dot / (2 * max(float(x @ x), 1e-300)) for x in (one, other))
        expected: Flat = start + a * one + b * other
        start[:] = _flat(parameter)  # the factors of a rank without a step are not continuous
        return expected

    return combine


def _flat(parameter: torch.Tensor) -> Flat:
    return parameter.detach().reshape(-1).numpy().copy()
