"""Snapshots of torch: what was there when they were taken, whatever training does meanwhile."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hvdtrain.errors import UsageError
from hvdtrain.train.checkpoints import load_checkpoint, write_checkpoint
from hvdtrain.train.torch.state import TorchTrainingState, require_savable


class Net(nn.Module):
    """Has what is saved in other ways: tied, frozen, channels-last and half weights, buffers."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        convolution = nn.Conv2d(3, 4, 3)
        convolution.weight.data = convolution.weight.data.contiguous(
            memory_format=torch.channels_last
        )
        self.body = nn.Sequential(convolution, nn.BatchNorm2d(4), nn.Flatten())
        self.head = nn.Linear(4, 4)
        self.tied = self.head
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.slow = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.add_(1)  # as a momentum encoder does
        result: torch.Tensor = self.tied(self.head(self.body(inputs))) * self.scale.float()
        return result


class Training:
    """A model with an optimizer, averages of its weights and a scaler of its loss."""

    def __init__(self, seed: int = 0) -> None:
        self.model = Net(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, amsgrad=True)
        self.averages = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        extras = {"ema": self.averages, "scaler": self.scaler}
        self.state = TorchTrainingState(self.model, self.optimizer, extras)

    def backward(self, step: int) -> None:
        inputs = torch.randn(5, 3, 3, 3, generator=torch.Generator().manual_seed(step))
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(inputs).square().mean()).backward()

    def step(self, step: int) -> None:
        self.backward(step)
        self.state.settle()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.averages.update_parameters(self.model)

    def content(self) -> dict[str, Any]:
        return copy.deepcopy(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "extras": {"ema": self.averages.state_dict(), "scaler": self.scaler.state_dict()},
            }
        )


def test_a_snapshot_is_of_the_moment_it_was_taken() -> None:
    training = Training()
    for step in range(3):
        training.step(step)
    expected, snapshot = training.content(), training.state.snapshot()
    training.backward(3)
    assert not torch.equal(expected["model"]["slow"], training.model.slow)
    training.state.settle()
    with torch.no_grad():
        for tensor in (*training.model.parameters(), *training.averages.parameters()):
            tensor.fill_(7)
    for state in training.optimizer.state.values():
        state["exp_avg"].fill_(7)
    torch.testing.assert_close(snapshot(), expected, rtol=0, atol=0)


def test_other_extras_are_refused() -> None:
    training = Training()
    training.step(0)
    content = training.state.snapshot()()
    other = TorchTrainingState(training.model, training.optimizer, {"ema": training.averages})
    with pytest.raises(ValueError, match=r"it has ema, scaler, and this run ema: give --ema"):
        other.load(content)


class Counting(nn.Linear):
    """Has a buffer of an odd type, and state that is no tensor."""

    def __init__(self, calls: int, buffer: torch.Tensor) -> None:
        super().__init__(2, 2)
        self.calls = calls
        self.register_buffer("odd", buffer)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "shape": (1, None)}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


def counting(calls: int, buffer: torch.Tensor) -> tuple[Counting, TorchTrainingState]:
    model = Counting(calls, buffer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others: dict[Any, Any] = optimizer.state
    others["calls"] = calls
    others[model.weight] = {"sum": torch.full([2, 2], calls / 3, dtype=torch.float64)}
    return model, TorchTrainingState(model, optimizer)


def test_state_of_other_kinds_comes_back(tmp_path: Path) -> None:
    for dtype in (torch.float8_e4m3fn, torch.uint16, torch.complex64):
        _, state = counting(7, torch.ones(3).to(dtype))
        state.reserve()
        write_checkpoint(tmp_path, 1, 0, {**state.snapshot()(), "epoch": 1}, "pt")
        other, new = counting(0, torch.zeros(3).to(dtype))
        new.load(load_checkpoint(next(tmp_path.glob("*.safetensors")), "pt"))
        found = new.snapshot()()["optimizer"]["state"]
        assert (other.calls, found["calls"]) == (7, 7)
        assert torch.equal(found[0]["sum"], torch.full([2, 2], 7 / 3, dtype=torch.float64))
        assert new.weights().keys() == {"weight", "bias", "odd"}
        assert np.array_equal(new.weights()["odd"], state.weights()["odd"])
        next(tmp_path.glob("*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("buffer", "words"),
    [
        (torch.eye(2).to_sparse(), "model/odd is sparse_coo of float32, which a checkpoint cannot"),
        (torch.ones(2, dtype=torch.complex128), "model/odd is complex128, which a checkpoint"),
        (torch.ones(1).expand(2), "model/odd is expanded float32"),
        (torch.empty(2, device="meta"), "model/odd is on the meta device"),
    ],
)
def test_what_a_checkpoint_does_not_hold_is_refused(buffer: torch.Tensor, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        counting(0, buffer)[1].reserve()


def test_sparse_state_of_an_optimizer_is_refused() -> None:
    table = nn.Embedding(3, 2, sparse=True)
    sgd = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.9)
    table(torch.tensor([1])).sum().backward()
    sgd.step()
    with pytest.raises(UsageError, match=r"momentum_buffer is sparse_coo .* with dense state"):
        require_savable({"optimizer": sgd.state_dict()})


def test_a_lazy_module_is_refused() -> None:
    with pytest.raises(UsageError, match="model/weight has no values yet, because its module is"):
        require_savable({"model": nn.LazyLinear(2).state_dict()})
