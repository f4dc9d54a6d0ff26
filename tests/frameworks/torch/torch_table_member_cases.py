"""Every exchange of the catalog on a process set: trained there, and resumed there."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import torch
from logged import logged
from torch_exchange_checks import Checked, check_replicas, exchange_of, new_optimizer
from torch_table_cases import YES, Feature, Small, loss_of
from torch_training import difference

import hvdtrain.torch as hvd
from hvdtrain.core.process_set import ProcessSet

ANEW = "reset, logged"


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
            each.zero_grad()
            loss_of(its_model, step).backward()
            each.step()
    outside.flush()
    assert difference(model, alone) == 0.0, name
    return YES


def resumes_on_fewer_ranks(name: str, members: ProcessSet) -> str:
    """What three ranks have saved goes on with two of them."""
    model = Small()
    optimizer = new_optimizer(model, exchange_of(name, 6, 3))
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
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
            fewer.zero_grad()
            loss_of(smaller, step).backward()
            fewer.step()
        fewer.flush()
        check_replicas(smaller, members)
    lost = hvd.broadcast_object(bool(saved["own"]), root_rank=0)
    if not lost:
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
    return ANEW
