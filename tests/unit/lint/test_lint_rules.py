"""Each rule finds its mistake, in the right line, and leaves alone what is right."""

from __future__ import annotations

from pathlib import Path

import pytest
from hvdtrain_lint.check import check_script
from hvdtrain_lint.registry import RULES
from hvdtrain_lint.source.finding import Finding
from lint_cases import ACCELERATE, DDP, KERAS, MISTAKES, RIGHT

HVD = """
import torch
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler
import horovod.torch as h
h.init()
r, n = h.rank(), h.size()
m = torch.nn.Linear(2, 1)
inner = torch.optim.SGD(m.parameters(), lr=0.1)
h.broadcast_parameters(m.state_dict(), root_rank=0)
o = h.DistributedOptimizer(inner, named_parameters=m.named_parameters())
"""
# A class that holds what the script makes, and a function that returns it.
HOLDER = (
    HVD
    + """
def make(a):
    b = StepLR(a, 1)
    return b, DataLoader(d, 8, sampler=DistributedSampler(d))

class T:
    def __init__(self):
        self.a, self.b = make(o)
    def one(self):
        for x in self.b:
            f(m(x)).backward()
            o.step()
"""
)
# Names tell nothing: values have to be followed.
PLAIN_MISTAKES: list[tuple[str, str, str]] = [
    (
        "HVD101",
        HVD,
        "def who():\n    return h.rank()\nif who() == 0:\n    q = h.allreduce(x)  # here\n",
    ),
    (
        "HVD101",
        HVD,
        "class T:\n    def __init__(self):\n        self.i = h.rank()\n    def g(self, x):\n"
        "        if self.i == 0:\n            h.barrier()  # here\n",
    ),
    (
        "HVD104",
        HOLDER,
        "    def g(self):\n        if r == 0:\n            self.a.step()  # here\nT().g()\n",
    ),
    ("HVD104", HVD, "for a in [StepLR(o, 1)]:\n    if r == 0:\n        a.step()  # here\n"),
    (
        "HVD104",
        ACCELERATE,
        "import torch\nm = torch.nn.Linear(2, 1)\n"
        "a, b = accelerator.prepare(m, torch.optim.SGD(m.parameters(), 0.1))\n"
        "if accelerator.is_main_process:\n    b.step()  # here\n",
    ),
    ("HVD204", HVD, "a = h.allreduce(x)\nb = a.item()\nc = b / n  # here\n"),
    ("HVD206", DDP, "s = torch.manual_seed\ns(1)\na = DataLoader(d, 8, shuffle=True)  # here\n"),
    (
        "HVD301",
        HVD,
        "a = 0.1\na *= n\nb = torch.optim.SGD(p, lr=a)  # here\n"
        "c = 64 // n\nz = DataLoader(d, batch_size=c)\n",
    ),
    (
        "HVD304",
        HVD,
        "parser.add_argument('--b', help='samples of a batch over all ranks')\n"
        "a = parser.parse_args()\n"
        "c = a.b\nz = DataLoader(d, c)  # here\n",
    ),
    ("HVD305", HVD, "k = torch.cuda.device_count()\nz = DataLoader(d, 64 // k)  # here\n"),
    (
        "HVD401",
        KERAS,
        "class N(keras.Model):\n    pass\na = N()\nb = a\nb.save_weights('a.h5')  # here\n",
    ),
    ("HVD403", DDP + "import mlflow as a\n", "a.log_metric('loss', 1)  # here\n"),
    ("HVD405", DDP + "from tqdm.auto import tqdm as t\n", "for x in t(xs):  # here\n    f(x)\n"),
    ("HVD601", DDP, "b = dist.barrier\nb()\nb()  # here\n"),
]
# Names that seem to say what values deny.
PLAIN_RIGHT: list[tuple[str, str, str]] = [
    ("HVD104", HVD, "scheduler = Progress()\nif r == 0:\n    scheduler.step()\n"),
    (
        "HVD201",
        HVD,
        "a = DataLoader(d, 8, sampler=DistributedSampler(d))\n"
        "for epoch in range(3):\n    print(len(a))\nfor x in a:\n    f(m(x)).backward()\n",
    ),
    (
        "HVD202",
        HVD,
        "test_set = d\na = DataLoader(test_set, 8, sampler=DistributedSampler(test_set))\n"
        "for x in a:\n    f(m(x)).backward()\n    o.step()\n",
    ),
    ("HVD401", KERAS, "model_card = Card()\nmodel_card.save('card')\n"),
]


def found(folder: Path, text: str) -> list[Finding]:
    path = folder / "script.py"
    path.write_text(text)
    return check_script(path)


@pytest.mark.parametrize(("code", "start", "rest"), MISTAKES + PLAIN_MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, code: str, start: str, rest: str) -> None:
    text = start + rest
    lines = [number for number, line in enumerate(text.splitlines(), 1) if "# here" in line]
    hits = [finding.line for finding in found(tmp_path, text) if finding.code == code]
    assert hits == lines


@pytest.mark.parametrize(("code", "start", "rest"), RIGHT + PLAIN_RIGHT)
def test_what_is_right_is_left_alone(tmp_path: Path, code: str, start: str, rest: str) -> None:
    assert [str(each) for each in found(tmp_path, start + rest) if each.code == code] == []


def test_every_rule_has_both_kinds_of_scripts() -> None:
    codes = [rule.code for rule in RULES]
    assert len(set(codes)) == len(codes)
    assert {code for code, _, _ in MISTAKES} == set(codes)
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
