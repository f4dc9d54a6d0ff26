"""What an elastic script for Horovod relies on, on each rank, and what names it finds."""

import importlib
import sys
from itertools import chain

import horovod
import horovod.torch as hvd
import pytest
import torch
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.process_sets import ProcessSet, global_process_set
from horovod.common.util import extension_available, gpu_available, split_list
from horovod.torch.compression import NoneCompressor
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.functions import broadcast_object
from horovod.torch.mpi_ops import Average, allreduce_async_, rank, size, synchronize
from ranks import report


def values(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def own_state() -> hvd.elastic.TorchState:
    model = torch.nn.Linear(2, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(rank())
    sgd = torch.optim.SGD(model.parameters(), lr=1.0 + rank(), momentum=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=3 + rank())
    optimizer = hvd.DistributedOptimizer(sgd, named_parameters=model.named_parameters())
    return hvd.elastic.TorchState(
        model, optimizer, schedule=schedule, epoch=10 * rank(), names=[f"of rank {rank()}"]
    )


def step(state: hvd.elastic.TorchState) -> None:
    state.optimizer.zero_grad()
    sum(p.sum() for p in state.model.parameters()).mul(1 + rank()).backward()
    state.optimizer.step()


def a_run_begins_with_the_state_of_rank_0() -> None:
    state = own_state()

    @hvd.elastic.run
    def train(state: hvd.elastic.TorchState, factor: int, *, offset: int) -> int:
        assert values(state.model) == [0.0] * 3
        assert state.optimizer.param_groups[0]["lr"] == 1.0
        assert state.schedule.state_dict()["step_size"] == 3
        assert (state.epoch, state.names) == (0, ["of rank 0"])
        return factor * rank() + offset

    assert train(state, 3, offset=1) == 3 * rank() + 1
    assert train.__name__ == "train"


def restoring_undoes_what_was_not_committed() -> None:
    """Again and again, because what was restored must not be what is kept."""
    state = own_state()
    state.sync()
    step(state)
    average = (1 + size()) / 2  # of the gradients
    assert values(state.model) == [-average] * 3
    state.epoch, state.names[0] = 7, "seven"
    state.commit()
    for _ in range(3):
        step(state)  # the momentum is average, and becomes 1.5 average
        assert values(state.model) == [-2.5 * average] * 3
        state.names.append("eight")
        state.schedule.step_size, state.epoch = 99, 8
        state.restore()
        assert values(state.model) == [-average] * 3
        assert (state.epoch, state.names, state.schedule.step_size) == (7, ["seven"], 3)


def an_object_state_can_be_of_anything() -> None:
    state = hvd.elastic.ObjectState(hvd.broadcast_object, hvd.rank, batch=0)
    state.batch = 5 + rank()
    state.register_reset_callbacks([lambda: sys.exit("never called")])
    state.check_host_updates()
    state.sync()
    assert state.batch == 5
    state.batch = 6
    state.restore()
    assert state.batch == 5


def a_sampler_deals_what_is_left() -> None:
    """Each sample once, and after a restart those that no rank has recorded."""
    sampler = ElasticSampler(range(24), shuffle=True, seed=3)
    orders = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        parts = hvd.allgather_object(list(sampler))
        assert sorted(chain(*parts)) == list(range(24))
        assert [len(part) for part in parts] == [24 // size()] * size() == [len(sampler)] * size()
        orders.append(parts)
    assert orders[0] != orders[1]
    sampler.record_batch(0, 2)
    sampler.record_batch(1, 2)
    done = {index for part in orders[1] for index in part[:4]}
    saved = sampler.state_dict()
    assert (saved["epoch"], set(saved["processed_indices"])) == (1, done)
    other = ElasticSampler(range(24), shuffle=True, seed=3)
    other.load_state_dict(saved)
    left = hvd.allgather_object(list(other))
    assert set(chain(*left)) == set(range(24)) - done
    other.set_epoch(2)
    assert len(other) == 24 // size()


def a_sampler_pads_and_learns_what_others_did() -> None:
    """Indices that only one rank recorded are known to all after sync()."""
    state = hvd.elastic.TorchState(sampler=ElasticSampler(range(2 * size() + 1), shuffle=False))
    dealt = hvd.allgather_object(list(state.sampler))
    everywhere = [*range(2 * size() + 1), *range(size() - 1)]
    assert dealt == [everywhere[number :: size()] for number in range(size())]
    state.sampler.record_indices([2 * rank()])
    state.sync()
    expected = [2 * number for number in range(size())]
    assert state.sampler.state_dict() == {"epoch": 0, "processed_indices": expected}
    state.sampler.set_epoch(1)
    state.restore()
    assert state.sampler.state_dict() == {"epoch": 0, "processed_indices": expected}
    assert len(state.sampler) == -(-(size() + 1) // size())


def modules_are_the_same_under_both_names() -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("horovod."):
            assert module.__name__.startswith("hvdtrain."), name
            assert sys.modules[module.__name__] is module
            assert module.__spec__ is not None
            assert module.__spec__.name == module.__name__
    assert importlib.import_module("hvdtrain.torch") is hvd
    assert hvd.elastic.TorchState.__module__ == "hvdtrain.torch.elastic.state"
    sampler = importlib.import_module("hvdtrain.torch.elastic.sampler")
    assert sampler.ElasticSampler is ElasticSampler
    assert horovod.__version__ == "0.28.1"


def names_do_what_they_say() -> None:
    tensor = torch.full((3,), float(rank()))
    synchronize(allreduce_async_(tensor, op=Average))
    assert tensor.tolist() == [(size() - 1) / 2] * 3
    assert broadcast_object(rank(), root_rank=size() - 1) == size() - 1
    assert isinstance(global_process_set, ProcessSet)
    assert hvd.Compression.none is NoneCompressor
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert [split_list("abcdefg", parts) for parts in (1, 3)] == [["abcdefg"], ["abc", "de", "fg"]]
    assert extension_available("torch")
    assert not extension_available("mxnet")
    assert gpu_available("torch") == torch.cuda.is_available()
    with pytest.raises(HorovodInternalError, match="differs"):
        hvd.allreduce(torch.ones(1 + rank()), name="differs")


def what_is_not_there_says_so() -> None:
    for statement, words in REFUSED.items():
        with pytest.raises(ImportError) as raised:
            exec(statement, {})
        assert all(word in str(raised.value) for word in words), raised.value


REFUSED = {
    "from horovod import gone": ["no horovod.gone; it has horovod.common"],
    "import horovod.spark": [
        "no horovod.spark; it has horovod.common, horovod.keras, horovod.runner, horovod.tensorflow"
    ],
    "import horovod.torch.gone": ["no horovod.torch.gone; it has", "horovod.torch.elastic"],
    "from horovod.torch import gone": ["cannot import name 'gone'"],
}


CASES = (
    a_run_begins_with_the_state_of_rank_0,
    restoring_undoes_what_was_not_committed,
    an_object_state_can_be_of_anything,
    a_sampler_deals_what_is_left,
    a_sampler_pads_and_learns_what_others_did,
    modules_are_the_same_under_both_names,
    names_do_what_they_say,
    what_is_not_there_says_so,
)

if __name__ == "__main__":
    hvd.elastic.init()
    for case in CASES:
        case()
    report(cases=len(CASES))
    hvd.elastic.shutdown()
