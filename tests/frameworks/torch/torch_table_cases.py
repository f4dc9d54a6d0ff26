"""Every exchange of the catalog with whatever a training loop may do: what works, what is refused.

FOUND has what was found, by feature and exchange, as the table in docs/exchanges.md says it.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from logged import logged
from nodes import nodes_of_their_own
from torch_exchange_checks import Checked, exchange_of, new_optimizer
from torch_training import check_equal, difference, drawn, gradients

import hvdtrain.torch as hvd
from hvdtrain.core.exchanges.catalog import EXCHANGES
from hvdtrain.core.exchanges.warm_up import WarmUp
from hvdtrain.core.gradients.exchange import Exchange, SavedExchange
from hvdtrain.core.process_set import ProcessSet, global_process_set
from hvdtrain.errors import MismatchError

YES, REFUSED, OWN, RESULT = "yes", "refused", "own", "result"
FOUND: dict[str, dict[str, str]] = {}
Feature = Callable[[str], str]
FEATURES: dict[str, Feature] = {}


def feature(title: str) -> Callable[[Feature], Feature]:
    def add(function: Feature) -> Feature:
        FEATURES[title] = function
        return function

    return add


def run_features(features: dict[str, Feature]) -> None:
    """Find what works with every exchange; each rank is a node, so that compressions act."""
    with nodes_of_their_own():
        for title, function in features.items():
            FOUND[title] = {name: function(name) for name in EXCHANGES}


class Small(torch.nn.Module):
    """Two layers in float64, and one that only some losses use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.spare = torch.nn.Linear(8, 4)
        self.double()

    def forward(self, inputs: torch.Tensor, spare: bool) -> torch.Tensor:
        outputs: torch.Tensor = self.last(torch.tanh(self.first(inputs)))
        return outputs + self.spare(inputs) if spare else outputs


def loss_of(
    model: torch.nn.Module, step: int, spare: bool = True, factor: float = 1.0
) -> torch.Tensor:
    seed = 10 * step + hvd.rank()
    loss: torch.Tensor = (model(drawn(seed, 4, 8), spare) - drawn(seed + 5, 4, 4)).square().mean()
    return factor * loss


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def made(exchange: Exchange | str | None) -> tuple[Small, hvd.DistributedOptimizer]:
    model = Small()
    return model, new_optimizer(model, exchange)


def fresh(name: str, members: ProcessSet = global_process_set) -> Exchange:
    return exchange_of(name, len(list(Small().parameters())), members.size() or 0)


def refusal(error: Exception, *parts: str) -> str:
    assert "\n" not in str(error), error
    assert all(part in str(error) for part in parts), error
    return REFUSED


def in_turn(outcomes: Sequence[str]) -> str:
    return ", then ".join(dict.fromkeys(outcomes))


@feature("warm-up")
def begins_with_averages(name: str) -> str:
    try:
        warm = WarmUp(fresh(name), 2)
    except ValueError as error:
        return refusal(error, name, "begins with plain averages by itself")
    (model, optimizer), (plain_model, plain) = made(warm), made(None)
    for step in range(2):
        for each, its_model in ((optimizer, model), (plain, plain_model)):
            train(its_model, each, step)
        assert difference(model, plain_model) < 1e-12, name
    other_model, other = made(fresh(name))
    carry_over((model, optimizer), (other_model, other))
    for step in range(2, 6):
        for each, its_model in ((optimizer, model), (other, other_model)):
            train(its_model, each, step)
        assert difference(model, other_model) == 0.0, name
    return YES


def carry_over(
    one: tuple[Small, hvd.DistributedOptimizer], other: tuple[Small, hvd.DistributedOptimizer]
) -> None:
    """Give a new optimizer and its model what another one has, but for the exchange's state."""
    other[0].load_state_dict(one[0].state_dict())
    other[1].load_state_dict(deepcopy(one[1].state_dict()))
    other[1].use_bucket_plan(one[1].bucket_plan())


@feature("loss scaler")
def skips_steps_that_are_not_finite(name: str) -> str:
    """The same bits as without a scaler, and without the steps that it skips."""
    model, optimizer = made(fresh(name))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    optimizer.loss_scaler = scaler
    skipped: dict[int, str] = {}
    for step in range(7):
        poisoned, alone = step in (1, 4), optimizer.exchanges_weights
        before, kept = deepcopy(model), None if alone else optimizer.exchange_state()
        optimizer.zero_grad()
        loss = loss_of(model, step)
        if poisoned and hvd.rank() == 1:
            loss = loss + model.first.weight[0, 0] * torch.inf
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not poisoned:
            continue
        skipped[step] = OWN if alone else YES
        assert hvd.rank() != 1 or difference(model, before) == 0.0, name
        if kept is not None:
            assert difference(model, before) == 0.0, name
            check_equal_state(optimizer.exchange_state(), kept)
    optimizer.flush()
    plain_model, plain = made(fresh(name))
    for step in range(7):
        if step not in skipped or (skipped[step] == OWN and hvd.rank() == 0):
            train(plain_model, plain, step)
    plain.flush()
    assert difference(model, plain_model) == 0.0, name
    check_equal(model.parameters())
    return in_turn(list(skipped.values()))


def check_equal_state(one: SavedExchange, other: SavedExchange) -> None:
    for a, b in ((one["own"], other["own"]), (one["shared"], other["shared"])):
        assert a.keys() == b.keys()
        assert all((a[key] == b[key]).all() for key in a)


@feature("clipping clips")
def clips(name: str) -> str:
    model, optimizer = made(fresh(name))
    limit, found = 0.05, []
    for step in range(4):
        alone = optimizer.exchanges_weights
        own = torch.autograd.grad(loss_of(model, step), list(model.parameters()))
        optimizer.zero_grad()
        loss_of(model, step).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        clipped = torch.nn.utils.get_total_norm(gradients(model))
        assert abs(float(clipped) - min(limit, float(norm))) < 1e-6
        if alone:
            assert abs(float(norm - torch.nn.utils.get_total_norm(own))) < 1e-12
        else:
            assert torch.equal(*hvd.allgather(norm.reshape(1), name="norm"))
        optimizer.step()
        found.append(OWN if alone else RESULT)
        if optimizer.synchronized:
            check_equal(model.parameters())
    return in_turn(found)


@feature("accumulation")
def accumulates(name: str) -> str:
    checked = Checked(name, model := Small(), passes=2)
    for step in range(5):
        checked.step(
            partial(loss_of, model, 2 * step, factor=0.5),
            partial(loss_of, model, 2 * step + 1, factor=0.5),
        )
    checked.flush()
    return YES


@feature("`sample_weight`")
def counts_samples(name: str) -> str:
    checked = Checked(name, model := Small())
    try:
        for step in range(5):
            counts = [[3.0, 1.0], [1.0, 2.0], [0.0, 4.0]][step % 3]
            losses = [partial(loss_of, model, step)]
            checked.step(*losses[: int(counts[hvd.rank()])], weights=counts)
    except ValueError as error:
        return refusal(error, name, "counts all ranks alike: leave sample_weight at None")
    checked.flush()
    return YES


@feature("`join()`")
def goes_on_without_a_rank(name: str) -> str:
    """As if the rank that has joined had zeros."""
    models = [Small(), Small()]
    one, other = (new_optimizer(model, fresh(name), momentum=0.0) for model in models)
    for step in range(3):
        for model, optimizer in zip(models, (one, other), strict=True):
            train(model, optimizer, step)
    other.zero_grad()
    (loss_of(models[1], 3) * hvd.rank()).backward()
    other.step()
    outcome = YES
    if hvd.rank() == 1:
        try:
            train(models[0], one, 3)
            assert difference(*models) < 1e-12, name
        except MismatchError as error:
            outcome = refusal(error, "rank 0 joined", f"exchange {name!r}"[:-1], "instead of join")
    hvd.join()
    return str(hvd.broadcast_object(outcome, root_rank=1))


@feature("`add_param_group()`")
def takes_more_parameters(name: str) -> str:
    model = Small()
    spare = model.spare
    del model.spare
    checked = Checked(name, model)
    for step in range(4):
        checked.step(partial(loss_of, model, step, spare=False))
    model.spare = spare
    checked.optimizer.add_param_group({"params": list(spare.parameters())})
    for parameter_name, parameter in spare.named_parameters():
        checked.watch(f"spare.{parameter_name}", parameter)
    for step in range(4, 9):
        checked.step(partial(loss_of, model, step))
    checked.flush()
    return YES


@feature("freezing")
def freezes_and_unfreezes(name: str) -> str:
    """A layer is frozen in the first step and in the third, and then no more."""
    checked, found = Checked(name, model := Small()), []
    for step in range(4):
        model.last.weight.requires_grad_(step % 2 == 1)
        before = model.last.weight.detach().clone()
        try:
            checked.step(partial(loss_of, model, step))
            if step % 2 == 0:
                assert torch.equal(model.last.weight, before), name
                found.append(YES)
        except RuntimeError as error:
            found.append(refusal(error, name, "'last.weight' is frozen now", "wrap the optimizer"))
    model.last.weight.requires_grad_(True)
    checked.flush()
    return in_turn(found)


@feature("unused layers")
def leaves_layers_out(name: str) -> str:
    """Layers that all ranks use, none, or one; and a step in which all gradients are zero."""
    checked = Checked(name, model := Small())
    uses = [True, False, hvd.rank() == 0, False, True, hvd.rank() == 1, True]
    for step, spare in enumerate(uses):
        factor = 0.0 if step == 4 else 1.0
        checked.step(partial(loss_of, model, step, spare, factor))
    checked.flush()
    return YES


@feature("sparse gradients")
def gathers_sparse_gradients(name: str) -> str:
    torch.manual_seed(0)
    rows = torch.nn.Embedding(6, 4, sparse=True, dtype=torch.float64)
    model = torch.nn.Sequential(rows, torch.nn.Linear(4, 8, dtype=torch.float64))
    checked = Checked(name, model)
    for step in range(5):
        chosen = torch.tensor([step % 6, (step + hvd.rank()) % 6, 3])
        checked.step(partial(squares, model, chosen))
    checked.flush()
    return YES


def squares(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


@feature("resume")
def goes_on_with_the_same_bits(name: str) -> str:
    model, optimizer = made(fresh(name))
    for step in range(4):
        train(model, optimizer, step)
    optimizer.flush()
    other_model, other = made(fresh(name))
    train(other_model, other, 0)  # in the middle of a block of local steps
    carry_over((model, optimizer), (other_model, other))
    other.load_exchange_state(deepcopy(optimizer.exchange_state()))
    for step in range(4, 9):
        for each, its_model in ((optimizer, model), (other, other_model)):
            train(its_model, each, step)
        assert difference(model, other_model) == 0.0, name
    for each in (optimizer, other):
        each.flush()
    assert difference(model, other_model) == 0.0, name
    check_equal_state(optimizer.exchange_state(), other.exchange_state())
    return YES


RESET = "reset, logged"


def member_features() -> dict[str, Feature]:
    members = hvd.add_process_set([0, 1])
    return {
        "process sets": lambda name: trains_without_the_others(name, members),
        "another number of ranks": lambda name: resumes_on_fewer_ranks(name, members),
    }


def trains_without_the_others(name: str, members: ProcessSet) -> str:
    model, alone = Small(), Small()
    if members.included():
        checked = Checked(name, model, members=members)
        for step in range(5):
            checked.step(partial(loss_of, model, step))
        checked.flush()
        return YES
    outside = new_optimizer(model, exchange_of(name, 6, 2), 0.9, members=members)
    inner = torch.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        for each, its_model in ((outside, model), (inner, alone)):
            train(its_model, each, step)
    outside.flush()
    assert difference(model, alone) == 0.0, name
    return YES


def resumes_on_fewer_ranks(name: str, members: ProcessSet) -> str:
    """Load on two ranks what three have saved."""
    model = Small()
    optimizer = new_optimizer(model, exchange_of(name, 6, 3))
    for step in range(4):
        train(model, optimizer, step)
    optimizer.flush()
    saved = deepcopy(optimizer.exchange_state())
    assert saved["ranks"] == 3
    told: list[str] = []
    if members.included():
        smaller = Small()
        smaller.load_state_dict(model.state_dict())
        fewer = new_optimizer(smaller, exchange_of(name, 6, 2), members=members)
        told = logged(lambda: fewer.load_exchange_state(saved))
        after = fewer.exchange_state()
        assert not after["own"]
        for key, array in saved["shared"].items():
            assert (after["shared"][key] == array).all(), (name, key)
        for step in range(4, 8):
            train(smaller, fewer, step)
        fewer.flush()
        check_equal(smaller.parameters(), members)
    if not hvd.broadcast_object(bool(saved["own"]), root_rank=0):
        assert not told
        return YES
    if hvd.rank() == 0:
        (line,) = told
        assert line.startswith(
            f"exchange {saved['spec']!r}: its state was saved by 3 ranks, and now there are 2"
        )
        assert "\n" not in line
    else:
        assert not told
    return RESET
