"""What the lint finds in scripts, and leaves alone, and how much it does for that."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from hvdtrain_lint.command import FINDERS, check_script
from hvdtrain_lint.rules.rule import RULES, Finding
from lint_cases import DDP, MISTAKES, RIGHT
from lint_plain_cases import FORM_MISTAKES, FORM_RIGHT, HVD, PLAIN_MISTAKES, PLAIN_RIGHT


def found(folder: Path, text: str) -> list[Finding]:
    path = folder / "script.py"
    path.write_text(text)
    return check_script(path)


# Two methods of one name, of which one, the last in the text, tells rank 0 from the others.
TESTS = """
class Options:
    def first(self):
        return self.kind == "first"

class Log:
    def first(self):
        return rank == 0
"""
# Two methods of one name, of which the first communicates on the ranks that it is told to.
JOBS = """
class Saver:
    def run(self, chosen):
        if chosen:
            dist.barrier()  # perhaps

class Printer:
    def run(self, chosen):
        if chosen:
            print(x)
"""
METHODS_FOUND = [
    TESTS + "log = Log()\nif log.first():\n    dist.barrier()  # here\n",
    TESTS + "if Log().first():\n    dist.barrier()  # here\n",
    # Where no other class has the name, the owner may be a part of another file.
    "class Log:\n    def first(self):\n        return rank == 0\n"
    "def run(log):\n    if log.first():\n        dist.barrier()  # here\n",
    JOBS.replace("perhaps", "here") + "Saver().run(rank == 0)\nPrinter().run(step == 0)\n",
    # A function inside another one, and one of its name outside.
    "def first():\n    return step == 0\ndef run():\n    def first():\n        return rank == 0\n"
    "    if first():\n        dist.barrier()  # here\n",
    # The class of a method may be named, which then gets `self` as an argument.
    "class Base:\n def __init__(self, chosen):\n  if chosen:\n   dist.barrier()  # here\n"
    "class Other(Base):\n def __init__(self):\n  Base.__init__(self, rank == 0)\n",
]
METHODS_LEFT_ALONE = [
    TESTS + "options = Options()\nif options.first():\n    dist.barrier()\n",
    TESTS + "def run(any):\n    if any.first():\n        dist.barrier()\n",
    TESTS + "def first():\n    return step == 0\nif first():\n    dist.barrier()\n",
    TESTS + "import other\nif other.first():\n    dist.barrier()\n",
    TESTS + "from other import first\nif first():\n    dist.barrier()\n",
    JOBS + "Printer().run(rank == 0)\n",
    JOBS + "def each(job):\n    job.run(rank == 0)\n",
    JOBS + "import other\nother.run(rank == 0)\nother.Job().run(rank == 0)\n",
    JOBS + "def run(chosen):\n    print(chosen)\nrun(rank == 0)\n",
    "def first():\n    return rank == 0\ndef run():\n    def first():\n        return step == 0\n"
    "    if first():\n        dist.barrier()\n",
]
METHOD_MISTAKES = [("HVD101", DDP, rest) for rest in METHODS_FOUND]
METHODS_RIGHT = [("HVD101", DDP, rest) for rest in METHODS_LEFT_ALONE]


ALL_MISTAKES = MISTAKES + PLAIN_MISTAKES + FORM_MISTAKES + METHOD_MISTAKES
ALL_RIGHT = RIGHT + PLAIN_RIGHT + FORM_RIGHT + METHODS_RIGHT


@pytest.mark.parametrize(("code", "start", "rest"), ALL_MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, code: str, start: str, rest: str) -> None:
    text = start + rest
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
    hits = [finding.line for finding in found(tmp_path, text) if finding.code == code]
    assert hits == lines


@pytest.mark.parametrize(("code", "start", "rest"), ALL_RIGHT)
def test_what_is_right_is_left_alone(tmp_path: Path, code: str, start: str, rest: str) -> None:
    assert [str(each) for each in found(tmp_path, start + rest) if each.code == code] == []


def test_every_rule_has_both_kinds_of_scripts() -> None:
    codes = [rule.code for rule in FINDERS]
    assert sorted(codes) == [code for code in RULES if code < "HVD9"]
    assert {code for code, _, _ in PLAIN_MISTAKES} == set(codes)
    assert {code for code, _, _ in RIGHT} == set(codes)


def test_values_are_followed_into_modules_beside_the_script(tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(
        "from torch.optim.lr_scheduler import StepLR\nimport torch.distributed as q\n"
        "def make(o):\n    return StepLR(o, 1)\n"
        "def mean(x):\n    q.all_reduce(x)\n    return x\n"
    )
    rest = (
        "import parts\nfrom parts import make, mean as k\na, b = make(o), parts.make(o)\n"
        "if r == 0:\n    a.step()\n    b.step()\n    k(x)\n    parts.mean(x)\n"
    )
    hits = [(each.code, each.line) for each in found(tmp_path, HVD + rest)]
    first = len(HVD.splitlines()) + 5
    assert hits == [
        *(("HVD104", first), ("HVD104", first + 1), ("HVD101", first + 2), ("HVD101", first + 3))
    ]


DISTRIBUTOR = """
import os
import mlflow
import torch
import torch.distributed as dist
from pyspark.ml.torch.distributor import TorchDistributor
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets


def train_epoch(model, loader, optimizer, epoch):
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = loss_of(model(inputs), labels)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"epoch {epoch}: {loss.item()}")  # HVD404
            if int(os.environ["RANK"]) == 0:
                mlflow.log_metric("loss", loss.item())


def save(folder, model, epoch):
    torch.save(model.module.state_dict(), f"{folder}/{epoch}.pt")


def main(folder):
    dist.init_process_group("nccl")
    rank = int(os.environ["RANK"])
    if rank == 0:
        mlflow.log_params({"epochs": 3})
    data = datasets.MNIST("data", train=True, download=True)  # HVD406
    loader = DataLoader(data, batch_size=100, sampler=DistributedSampler(data))  # HVD201
    model = DDP(Network())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    for epoch in range(1, 4):
        train_epoch(model, loader, optimizer, epoch)
        if rank == 0:
            save(folder, model, epoch)
    test_data = datasets.MNIST("data", train=False, download=True)  # HVD406
    loss = sum(loss_of(model(inputs), labels) for inputs, labels in DataLoader(test_data))
    mlflow.log_metric("test_loss", loss.item() / len(test_data))  # HVD403
    dist.destroy_process_group()


TorchDistributor(num_processes=2, local_mode=True, use_gpu=False).run(main, "models")
"""


def test_the_mistakes_of_a_script_are_found_and_nothing_else(tmp_path: Path) -> None:
    expected = {
        (number, code.split()[0])
        for number, line in enumerate(DISTRIBUTOR.splitlines(), 1)
        for code in line.split("# ")[1:]
        if code.startswith("HVD")
    }
    assert {(each.line, each.code) for each in found(tmp_path, DISTRIBUTOR)} == expected


def calls_in(function: Callable[[], object]) -> int:
    """Return how many functions Python calls, or goes on with, in a function."""
    count = 0

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    gc.disable()  # it would call what others have left
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return count


@pytest.mark.parametrize("term", ["'a'", "a.b * f(a)"])
@pytest.mark.parametrize("rest", ["x = {}\n", "print({})\n", "for y in z:\n    print(y, {})\n"])
def test_long_sums(tmp_path: Path, term: str, rest: str) -> None:
    def calls(terms: int) -> int:
        path = tmp_path / "script.py"
        path.write_text(DDP + rest.format(" + ".join([term] * terms)))
        return calls_in(lambda: check_script(path))

    few, some, many = (calls(terms) for terms in (50, 200, 350))
    # As many terms more, as much more to do; and as the square of them, twice as much and more.
    assert many - some == pytest.approx(some - few, rel=0.2)
