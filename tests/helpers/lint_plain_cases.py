"""The mistakes of every rule in scripts whose names tell nothing: values have to be followed."""

from lint_cases import ACCELERATE, DDP, KERAS, METRICS

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

# Code, beginning of the script, the rest with the mistake (`# here` marks its line).
PLAIN_MISTAKES: list[tuple[str, str, str]] = [
    ("HVD101", HVD, "def who():\n return h.rank()\nif who() == 0:\n q = h.allreduce(x)  # here\n"),
    ("HVD102", HVD, "def f(x):\n    if r != 0:\n        return\n    h.barrier()  # here\n"),
    (
        *("HVD103", HVD),
        "z = h.DistributedOptimizer(inner, sharded=True)\ny = z\nif r == 0:\n"
        " s = y.state_dict()  # here\n",
    ),
    (
        *("HVD104", HOLDER),
        "    def g(self):\n        if r == 0:\n            self.a.step()  # here\nT().g()\n",
    ),
    (
        *("HVD104", ACCELERATE),
        "import torch\nm = torch.nn.Linear(2, 1)\n"
        "a, b = accelerator.prepare(m, torch.optim.SGD(m.parameters(), 0.1))\n"
        "if accelerator.is_main_process:\n b.step()  # here\n",
    ),
    ("HVD105", HVD, "q = xs[r::n]\nfor x in q:  # here\n    m(x).backward()\n"),
    (
        *("HVD106", KERAS),
        "i, c = hvd.rank(), hvd.callbacks\n"
        "a = [c.MetricAverageCallback()] if i == 0 else []  # here\n",
    ),
    (
        "HVD201",
        HOLDER.replace("sampler=DistributedSampler(d))", "sampler=DistributedSampler(d))  # here"),
        "    def g(self):\n        for e in range(3):\n            self.one()\nT().g()\n",
    ),
    (
        *("HVD202", HVD),
        "a = DataLoader(d, 8, sampler=DistributedSampler(d))  # here\nm.eval()\n"
        "with torch.no_grad():\n for x in a:\n  s += f(m(x))\n",
    ),
    (
        *("HVD203", DDP.replace("optimizer", "o")),
        "a = DataLoader(d, 8, sampler=DistributedSampler(d, drop_last=True))  # here\n"
        "with torch.no_grad():\n for x in a:\n  s += f(model(x))\nif rank == 0:\n print(s)\n",
    ),
    ("HVD204", HVD, "a = h.allreduce(x)\na = a.item()\nc = a / n  # here\n"),
    (
        *("HVD205", KERAS),
        "a = keras.callbacks.EarlyStopping()  # here\n"
        "b = [state, a, hvd.callbacks.MetricAverageCallback()]\n",
    ),
    ("HVD206", DDP, "s = torch.manual_seed\ns(1)\na = DataLoader(d, 8, shuffle=True)  # here\n"),
    ("HVD207", DDP, "c = torch.utils.data.random_split\na, b = c(d, [8, 2])  # here\n"),
    ("HVD208", HVD, "g = h.allreduce\ng(z, name='l')  # here\nprint(r, z)\n"),
    (
        *("HVD209", HVD),
        "q = d[r::n]\na = g(q) / len(q)\nb = a\nc = h.allreduce(b, name='c')  # here\n",
    ),
    (
        *("HVD210", DDP),
        "a = DataLoader(d, 8)\nwith torch.no_grad():\n for x in a:\n  s += f(x)\n"
        "dist.all_reduce(s)\nprint(rank, s / len(a.dataset))  # here\n",
    ),
    (
        *("HVD301", HVD),
        "a = 0.1\na *= n\nb = torch.optim.SGD(p, lr=a)  # here\nc = 64 // n\n"
        "z = DataLoader(d, batch_size=c)\n",
    ),
    ("HVD302", HVD, "a = 0.1 * n\nb = torch.optim.Adam(p, a * n)  # here\n"),
    (
        *("HVD303", KERAS),
        "a = 0.1\nb = hvd.callbacks.LearningRateWarmupCallback(initial_lr=a)  # here\n",
    ),
    (
        *("HVD304", HVD),
        "parser.add_argument('--b', help='samples of a batch over all ranks')\n"
        "a = parser.parse_args()\nc = a.b\nz = DataLoader(d, c)  # here\n",
    ),
    ("HVD305", HVD, "k = torch.cuda.device_count()\nz = DataLoader(d, 64 // k)  # here\n"),
    (
        *("HVD401", KERAS),
        "class N(keras.Model):\n pass\na = N()\nb = a\nb.save_weights('a.h5')  # here\n",
    ),
    ("HVD402", KERAS, "a = keras.callbacks\nb = [state, a.ModelCheckpoint('m.keras')]  # here\n"),
    ("HVD403", DDP + "import mlflow as a\n", "b = a.log_metric\nb('c', 1)  # here\n"),
    (
        *("HVD403", HVD + "from torch.utils.tensorboard import SummaryWriter as w\n"),
        "def g(a):\n a.add_scalar('b', 1)\nc = w\ng(c('d'))  # here\n",
    ),
    ("HVD404", DDP, "def a(x):\n print(x)  # here\ndef b():\n for x in xs:\n  a(x)\nb()\n"),
    ("HVD405", HVD + "from tqdm import tqdm as t\n", "a = t\nfor x in a(xs):  # here\n    m(x)\n"),
    ("HVD405", KERAS, "a = model.fit\na(x, y, callbacks=[state])  # here\n"),
    ("HVD406", DDP, "a = True\nb = datasets.MNIST('data', download=a)  # here\n"),
    (
        *("HVD501", "import torch\nimport hvdtrain.torch as h\nh.init()\n"),
        "w = h.DistributedOptimizer\na = w(b, named_parameters=p)  # here\n",
    ),
    (
        *("HVD502", "import keras\nimport hvdtrain.keras as h\nh.init()\n"),
        "w = h.DistributedOptimizer\na.compile(w(o))  # here\na.fit(x, y, verbose=0)\n",
    ),
    ("HVD503", HVD, "if r == 0:\n    m.load_state_dict(torch.load('a'))  # here\n"),
    (
        *("HVD504", "import torch\nimport horovod.torch as h\nh.init()\n"),
        "def make(p):\n return torch.optim.SGD(p, 0.1)\na = make(p)\nfor x in xs:\n"
        " f(x).backward()\n a.step()  # here\n",
    ),
    (
        *("HVD505", "import torch\nimport torch.distributed as d\nd.init_process_group('gloo')\n"),
        "c = torch.optim.SGD\na = c(p, 0.1)\nfor x in xs:\n f(x).backward()\n a.step()  # here\n",
    ),
    (
        *("HVD506", "import torch.nn as n\nimport hvdtrain.torch as h\nh.init()\n"),
        "c = n.SyncBatchNorm\na = [c(2)]  # here\na = c.convert_sync_batchnorm(b)  # here\n",
    ),
    ("HVD506", KERAS, "a = True\nb = keras.layers.BatchNormalization(synchronized=a)  # here\n"),
    ("HVD506", METRICS, "c = t.F1Score\na = c(average='macro')  # here\na(t.functional.f(x))\n"),
    ("HVD601", DDP, "b = dist.barrier\nb()\nb()  # here\n"),
]

# Names that seem to say what values deny.
PLAIN_RIGHT: list[tuple[str, str, str]] = [
    (
        *("HVD202", HVD),
        "test_set = d\na = DataLoader(test_set, 8, sampler=DistributedSampler(test_set))\n"
        "for x in a:\n f(m(x)).backward()\n o.step()\n",
    ),
]


# Mistakes in unusual forms of Python: whatever holds a value, it has to be followed.
_STEP = "if r == 0:\n    {}.step()  # here\n"

# The rest of scripts that begin with HVD, with the mistake (`# here` marks its line).
_BARRIERS = [
    "match r, x:\n case (0, 1) | (1, _):\n  h.barrier()  # here\n case _:\n  pass\n",
    "r == 0 and h.barrier()  # here\n",
    "q = [h.allreduce(x) for x in xs if r == 0]  # here\n",
    "q = getattr(h, 'barrier')\nif not r:\n q()  # here\n",
    "q = 0 if r else 1\nif q:\n h.barrier()  # here\n",
    "class T:\n @property\n def q(self):\n  return h.rank() == 0\nt = T()\nif t.q:\n"
    " h.barrier()  # here\n",
    "q = h.rank() > 0 or x\nif not q:\n h.barrier()  # here\n",
    "q = bool(h.rank())\nif q:\n h.barrier()  # here\n",
]
_STEPS = [
    "a = StepLR(o, 1)\ng = lambda: a.step()\nif r == 0:\n g()  # here\n",
    "a, *b = [o, StepLR(o, 1)]\n" + _STEP.format("b[-1]"),
    "a = StepLR(o, 1) if x else None\na.step() if r == 0 else None  # here\n",
    "from contextlib import contextmanager\n@contextmanager\ndef g():\n yield StepLR(o, 1)\n"
    "with g() as a:\n if not r:\n  a.step()  # here\n",
    "a = dict(b=1, c=StepLR(o, 1))\nk = 'c'\n" + _STEP.format("a[k]"),
    "a = [StepLR(b, 1) for b in (o, inner)]\n" + _STEP.format("a[0]"),
    "a = {'c': StepLR(o, 1)}\nif r == 0:\n [b.step() for b in a.values()]  # here\n",
    "from typing import NamedTuple\nclass T(NamedTuple):\n a: int\n b: object\n"
    "t = T(1, StepLR(o, 1))\n" + _STEP.format("t.b"),
    "class T:\n def __init__(self):\n  self.d = {}\n def put(self, k, v):\n  self.d[k] = v\n"
    "t = T()\nt.put('a', StepLR(o, 1))\n" + _STEP.format("t.d['a']"),
    "class T:\n @classmethod\n def of(cls, a):\n  t = cls()\n  t.a = a\n  return t\n"
    "t = T.of(StepLR(o, 1))\n" + _STEP.format("t.a"),
    "for a, b in zip([1], [StepLR(o, 1)]):\n if r == 0:\n  b.step()  # here\n",
    "def g(a=StepLR(o, 1)):\n if r == 0:\n  a.step()  # here\ng()\n",
    "def f():\n for b in o, inner:\n  yield StepLR(b, 1)\nfor a in f():\n if r == 0:\n"
    "  a.step()  # here\n",
    "from dataclasses import dataclass\n@dataclass\nclass T:\n a: object\n b: object\n"
    "t = T(1, b=StepLR(o, 1))\n" + _STEP.format("t.b"),
    "class A:\n def __init__(self, b):\n  self.a = b\nclass B(A):\n def __init__(self, b):\n"
    "  super().__init__(StepLR(b, 1))\n def g(self):\n  if r == 0:\n   self.a.step()  # here\n"
    "B(o).g()\n",
]
# Code, beginning of the script, the rest.
FORM_MISTAKES: list[tuple[str, str, str]] = [
    *(("HVD101", HVD, rest) for rest in _BARRIERS),
    *(("HVD104", HVD, rest) for rest in _STEPS),
    (
        *("HVD201", HVD),
        "from functools import partial\n"
        "g = partial(DataLoader, sampler=DistributedSampler(d))  # here\nb = g(d)\nwhile z:\n"
        " for i, x in enumerate(b):\n  f(m(x)).backward()\n  o.step()\n",
    ),
    (
        *("HVD201", HVD),
        "def g(*a, **b):\n return DataLoader(*a, **b)\n"
        "b = g(d, 8, sampler=DistributedSampler(d))  # here\nfor e in range(3):\n for x in b:\n"
        "  f(m(x)).backward()\n",
    ),
    ("HVD302", HVD, "a = 0.1\na = a * n\nb = torch.optim.Adam(p, a * n)  # here\n"),
    ("HVD406", DDP, "a = dict(download=True)\nb = datasets.MNIST('c', **a)  # here\n"),
]

# The same forms without a mistake.
FORM_RIGHT: list[tuple[str, str, str]] = [
    ("HVD101", HVD, "match x:\n    case 0:\n        h.barrier()\n"),
    ("HVD101", HVD, "match r:\n case 0:\n  h.barrier()\n case _:\n  h.barrier()\n"),
    ("HVD101", HVD, "if 0 <= r:\n    h.barrier()\n"),
]
