"""Typical mistakes in unusual forms of Python: whatever holds a value, it has to be followed."""

from lint_cases import DDP, KERAS
from lint_plain_cases import HVD

_STEP = "if r == 0:\n    {}.step()  # here\n"

# The rest of scripts that begin with HVD, with the mistake (`# here` marks its line).
_BARRIERS = [
    "match r, x:\n case (0, 1) | (1, _):\n  h.barrier()  # here\n case _:\n  pass\n",
    "r == 0 and h.barrier()  # here\n",
    "q = [h.allreduce(x) for x in xs if r == 0]  # here\n",
    "q = getattr(h, 'barrier')\nif not r:\n q()  # here\n",
    "q = 0 if r else 1\nif q:\n h.barrier()  # here\n",
    "from functools import partial\nq = partial(h.allreduce, name='q')\nif r == 0:\n"
    " z = q(x)  # here\n",
    "def a(x):\n return h.allreduce(x)\ndef b(x):\n return a(x)\nif r == 0:\n z = b(x)  # here\n",
    "class T:\n @property\n def q(self):\n  return h.rank() == 0\nt = T()\nif t.q:\n"
    " h.barrier()  # here\n",
    "q = h.rank() > 0 or x\nif not q:\n h.barrier()  # here\n",
    "q = bool(h.rank())\nif q:\n h.barrier()  # here\n",
    "def g(f):\n if r == 0:\n  f()  # here\ng(h.barrier)\n",
    "class T:\n def __call__(self):\n  h.barrier()\nt = T()\nif r == 0:\n t()  # here\n",
]
_STEPS = [
    "a = StepLR(o, 1)\ng = lambda: a.step()\nif r == 0:\n g()  # here\n",
    "if r == 0:\n (a := StepLR(o, 1)).step()  # here\n",
    "a, *b = [o, StepLR(o, 1)]\n" + _STEP.format("b[-1]"),
    "a = StepLR(o, 1) if x else None\na.step() if r == 0 else None  # here\n",
    "from contextlib import contextmanager\n@contextmanager\ndef g():\n yield StepLR(o, 1)\n"
    "with g() as a:\n if not r:\n  a.step()  # here\n",
    "a = {'b': 1, 'c': StepLR(o, 1)}\n" + _STEP.format("a['c']"),
    "a = {}\na['c'] = StepLR(o, 1)\n" + _STEP.format("a['c']"),
    "a = dict(b=1, c=StepLR(o, 1))\nk = 'c'\n" + _STEP.format("a[k]"),
    "a = []\na.append(StepLR(o, 1))\nfor b in a:\n if r == 0:\n  b.step()  # here\n",
    "a = [StepLR(b, 1) for b in (o, inner)]\n" + _STEP.format("a[0]"),
    "a = {'c': StepLR(o, 1)}\nif r == 0:\n [b.step() for b in a.values()]  # here\n",
    "from typing import NamedTuple\nclass T(NamedTuple):\n a: int\n b: object\n"
    "t = T(1, StepLR(o, 1))\n" + _STEP.format("t.b"),
    "class T:\n def __init__(self):\n  self.d = {}\n def put(self, k, v):\n  self.d[k] = v\n"
    "t = T()\nt.put('a', StepLR(o, 1))\n" + _STEP.format("t.d['a']"),
    "class T:\n @classmethod\n def of(cls, a):\n  t = cls()\n  t.a = a\n  return t\n"
    "t = T.of(StepLR(o, 1))\n" + _STEP.format("t.a"),
    "for a, b in zip([1], [StepLR(o, 1)]):\n if r == 0:\n  b.step()  # here\n",
    "def g(a, *b):\n if r == 0:\n  b[1].step()  # here\ng(1, o, StepLR(o, 1))\n",
    "def g(**a):\n if r == 0:\n  a['b'].step()  # here\ng(b=StepLR(o, 1))\n",
    "def g(a=StepLR(o, 1)):\n if r == 0:\n  a.step()  # here\ng()\n",
    "a = None\ndef f():\n global a\n a = StepLR(o, 1)\ndef g():\n if r == 0:\n"
    "  a.step()  # here\nf()\ng()\n",
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
    ("HVD204", HVD, "a = h.allreduce(x), h.allreduce(y)\nb = [c / n for c in a]  # here\n"),
    ("HVD302", HVD, "a = 0.1\na = a * n\nb = torch.optim.Adam(p, a * n)  # here\n"),
    ("HVD405", KERAS, "a = {'verbose': 1}\nmodel.fit(x, y, callbacks=[state], **a)  # here\n"),
    ("HVD406", DDP, "a = dict(download=True)\nb = datasets.MNIST('c', **a)  # here\n"),
    (
        *("HVD505", "import torch\nimport torch.distributed as d\nd.init_process_group('gloo')\n"),
        "class T:\n a = torch.optim.SGD(p, 0.1)\n def g(self):\n  for x in xs:\n"
        "   f(x).backward()\n   self.a.step()  # here\nT().g()\n",
    ),
]

# The same forms without a mistake.
FORM_RIGHT: list[tuple[str, str, str]] = [
    ("HVD101", HVD, "match x:\n    case 0:\n        h.barrier()\n"),
    ("HVD101", HVD, "match r:\n case 0:\n  h.barrier()\n case _:\n  h.barrier()\n"),
    ("HVD101", HVD, "if 0 <= r:\n    h.barrier()\n"),
    ("HVD101", HVD, "q = h.rank() > 0 or x\nif q:\n    h.barrier()\n"),
    ("HVD101", HVD, "a, *b = r, n\nif b[0] == 2:\n    h.barrier()\n"),
    ("HVD104", HVD, "a = {'b': P(), 'c': StepLR(o, 1)}\nif r == 0:\n    a['b'].step()\n"),
    ("HVD104", HVD, "for a, b in zip([P()], [o]):\n    if r == 0:\n        a.step()\n"),
    ("HVD104", HVD, "a = StepLR(o, 1)\ng = lambda: a.step()\nif x == 0:\n    g()\n"),
    ("HVD104", HVD, "class T:\n a = P()\nclass U:\n a = StepLR(o, 1)\nif r == 0:\n T().a.step()\n"),
    ("HVD401", DDP, "rank == 0 and torch.save(m, 'b')\n"),
]
