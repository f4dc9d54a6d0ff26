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
    (
        *("HVD101", HVD),
        "class T:\n def __init__(self):\n  self.i = h.rank()\n def g(self, x):\n"
        "  if self.i == 0:\n   h.barrier()  # here\n",
    ),
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
    ("HVD104", HVD, "def g(a):\n    if r == 0:\n        a.step()  # here\ng(StepLR(o, 1))\n"),
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
    ("HVD204", HVD, "def a(x):\n    return h.allreduce(x)\nb = a(x) / n  # here\n"),
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
    ("HVD305", HVD, "k = torch.cuda.device_count()\nz = torch.optim.SGD(p, 0.1 * k)  # here\n"),
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
    ("HVD104", HVD, "scheduler = Progress()\nif r == 0:\n    scheduler.step()\n"),
    (
        *("HVD201", HVD),
        "a = DataLoader(d, 8, sampler=DistributedSampler(d))\nfor epoch in range(3):\n"
        " print(len(a))\nfor x in a:\n f(m(x)).backward()\n",
    ),
    (
        *("HVD202", HVD),
        "test_set = d\na = DataLoader(test_set, 8, sampler=DistributedSampler(test_set))\n"
        "for x in a:\n f(m(x)).backward()\n o.step()\n",
    ),
    ("HVD401", KERAS, "model_card = Card()\nmodel_card.save('card')\n"),
]
