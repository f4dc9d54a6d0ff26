"""Short scripts with one mistake each, and the same scripts without it, by the rule's code."""

HVD = """
import torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
"""
DDP = """
import os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
model = DDP(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
"""
METRICS = "import torchmetrics as t\nimport hvdtrain.torch as h\nh.init()\n"
KERAS = """
import keras
import horovod.keras as hvd
hvd.init()
state = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
rate = 0.1 * hvd.size()
model.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(rate)), "mse")
"""
CHECKPOINTER = (
    DDP
    + """
class Checkpointer:
    def save(self, path):
        dist.barrier()
"""
)
ACCELERATE = """
from accelerate import Accelerator
accelerator = Accelerator()
"""

# Code, beginning of the script, the rest with the mistake (`# here` marks its line).
MISTAKES: list[tuple[str, str, str]] = [
    (
        *("HVD101", "import lightning as L\ntrainer = L.Trainer()\n"),
        "if trainer.is_global_zero:\n trainer.save_checkpoint('last.ckpt')  # here\n",
    ),
    (
        *("HVD101", CHECKPOINTER),
        "class Keeper(Checkpointer):\n def last(self):\n  if rank == 0:\n"
        "   self.save('m')  # here\n",
    ),
    # Several values, one of them a rank; an argument that other files may give.
    (
        *("HVD101", HVD),
        "rank = 0\ndef start():\n global rank\n rank = hvd.rank()\nstart()\nif rank == 0:\n"
        " hvd.allreduce(x)  # here\n",
    ),
    ("HVD102", DDP, "for x in xs:\n if rank > 0:\n  continue\n dist.all_reduce(x)  # here\n"),
    (
        *("HVD103", DDP + "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"),
        "model = FSDP(model)\nif rank == 0:\n torch.save(model.state_dict(), 'm.pt')  # here\n",
    ),
    ("HVD104", DDP, "if rank == 0:\n    print(x)\n    scheduler.step()  # here\n"),
    (
        *("HVD105", "import horovod.tensorflow as hvd\nhvd.init()\n"),
        "mine = data.shard(hvd.size(), hvd.rank()).batch(8)\nfor x in mine:  # here\n"
        " hvd.allreduce(x)\n",
    ),
    (
        *("HVD201", HVD + "from hvdtrain.data import GlobalBatchSampler\n"),
        "batches = GlobalBatchSampler(99, 8)  # here\nfor _ in range(epochs):\n f(batches)\n",
    ),
    ("HVD202", DDP, "held = MNIST('d', train=False)\ns = DistributedSampler(held)  # here\n"),
    ("HVD205", KERAS, "stop = keras.callbacks.ReduceLROnPlateau(monitor='loss')  # here\n"),
    (
        *("HVD305", DDP),
        "n = torch.cuda.device_count()\ns = DistributedSampler(d, num_replicas=n)  # here\n",
    ),
    ("HVD305", HVD, "size = batch_size // torch.cuda.device_count()  # here\n"),
    ("HVD401", HVD, "def save():\n    open('log', 'w').write('x')  # here\nsave()\n"),
]

# Code, beginning of the script, the rest as it should be.
RIGHT: list[tuple[str, str, str]] = [
    # The ranks meet in both branches, or in two conditions that are each other's reverse.
    ("HVD101", DDP, "if rank in (0, 1):\n    dist.all_reduce(x, group=pair)\n"),
    # -1 is not a rank: it says that there is one process only.
    ("HVD104", HVD, "if hvd.rank() == 0:\n    optimizer.step()\nhvd.join()\n"),
    # Other numbers that are named as ranks are.
    ("HVD101", HVD, "rank = 8\nif rank > 0:\n    hvd.barrier()\n"),
    ("HVD101", HVD, "for rank in range(hvd.size()):\n if rank == 0:\n  hvd.allreduce(x)\n"),
    ("HVD102", HVD, "def f(x):\n hvd.barrier()\n if hvd.rank() != 0:\n  return\n g(x)\n"),
    ("HVD102", DDP, "def f(x):\n    if x is None:\n        return\n    dist.all_reduce(x)\n"),
    (
        *("HVD103", DDP + "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP\n"),
        "model = FSDP(model)\nx = model.state_dict()\nif rank == 0:\n torch.save(x, 'm')\n",
    ),
    ("HVD105", HVD, "for x in xs[hvd.rank() :: hvd.size()]:\n model(x).backward()\nhvd.join()\n"),
    ("HVD105", HVD, "for x in xs[hvd.rank() :: hvd.size()]:\n    total += model(x)\n"),
    # A name that is made from itself alone.
    ("HVD105", HVD, "from data import *\nxs = xs.map(f)\nfor x in xs:\n    hvd.allreduce_(x)\n"),
    (
        *("HVD106", KERAS),
        "calls = [hvd.callbacks.MetricAverageCallback()]\nif hvd.rank() == 0:\n"
        " calls.append(keras.callbacks.CSVLogger('log'))\n",
    ),
    (
        *("HVD201", DDP),
        "sampler = DistributedSampler(data)\nfor epoch in range(epochs):\n"
        " sampler.set_epoch(epoch)\n train(DataLoader(data, 8, sampler=sampler))\n",
    ),
    ("HVD201", DDP, "s = DistributedSampler(data)\nfor epoch in range(1):\n    train(s)\n"),
    ("HVD202", DDP, "s = DistributedSampler(test_set)\nresults = gathered[: len(test_set)]\n"),
    (
        *("HVD203", DDP),
        "sampler = DistributedSampler(val_data, drop_last=True)\ndist.all_reduce(hits)\n"
        "if rank == 0:\n print(hits)\n",
    ),
    ("HVD204", HVD, "loss = hvd.allreduce(x, op=hvd.Sum) / hvd.size()\n"),
    (
        *("HVD205", KERAS),
        "calls = [state, hvd.callbacks.MetricAverageCallback(), keras.callbacks.EarlyStopping()]\n",
    ),
    ("HVD206", DDP, "torch.manual_seed(rank)\nloader = DataLoader(data, 8, shuffle=True)\n"),
    (
        *("HVD206", DDP),
        "torch.manual_seed(1)\nloader = DataLoader(d, 8, sampler=DistributedSampler(d))\n",
    ),
    ("HVD207", DDP, "torch.manual_seed(1)\na, b = torch.utils.data.random_split(data, [8, 2])\n"),
    ("HVD208", HVD, "loss = hvd.allreduce(loss, name='l')\nhvd.allreduce_(loss)\nprint(loss)\n"),
    (
        *("HVD209", HVD),
        "mine = test[hvd.rank() :: hvd.size()]\n"
        "mean = hvd.allreduce(hits(mine), op=hvd.Sum) / len(test)\n",
    ),
    ("HVD209", HVD, "mine = test[:9]\nrate = hits(mine) / len(mine)\nmean = hvd.allreduce(rate)\n"),
    (
        *("HVD210", DDP),
        "loader = DataLoader(test_set, 8, sampler=own)\nhits = count(loader)\n"
        "dist.all_reduce(hits)\nprint(rank, hits / len(loader.dataset))\n",
    ),
    (
        *("HVD210", DDP),
        "loader = DataLoader(test_set, 8)\nhits = count(loader)\ndist.all_reduce(hits)\n"
        "print(rank, hits / len(loader.dataset) / dist.get_world_size())\n",
    ),
    (
        *("HVD301", HVD),
        "o = torch.optim.SGD(p, lr=0.1 * hvd.size())\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=64)\n",
    ),
    ("HVD302", HVD, "rate = 0.1 * hvd.size()\no = torch.optim.Adam(p, rate)\n"),
    ("HVD303", KERAS, "w = hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate)\n"),
    ("HVD304", DDP, "n = global_batch_size // dist.get_world_size()\nl = DataLoader(data, n)\n"),
    (
        *("HVD304", HVD),
        "parser.add_argument('--batch-size', help='per GPU; the total batch is larger')\n"
        "loader = torch.utils.data.DataLoader(data, args.batch_size)\n",
    ),
    (
        *("HVD305", HVD),
        "parser.add_argument('--batch-size', help='of all GPUs of a node')\n"
        "size = args.batch_size // torch.cuda.device_count()\n",
    ),
    ("HVD305", DDP, "torch.cuda.set_device(rank % torch.cuda.device_count())\n"),
    ("HVD401", DDP, "if rank == 0:\n    torch.save(model.state_dict(), 'model.pt')\n"),
    ("HVD401", DDP, "torch.save(state, f'model-{rank}.pt')\n"),
    (
        *("HVD402", KERAS),
        "if hvd.rank() == 0:\n calls.append(keras.callbacks.ModelCheckpoint('m.keras'))\n",
    ),
    (
        *("HVD402", KERAS),
        "saving = keras.callbacks.ModelCheckpoint('m.keras')\n"
        "calls = [hvd.callbacks.RankZero(saving)]\n",
    ),
    (
        *("HVD403", HVD + "from torch.utils.tensorboard import SummaryWriter\n"),
        "writer = SummaryWriter('logs') if hvd.rank() == 0 else None\n",
    ),
    ("HVD404", DDP, "print('start')\nfor x in xs:\n    print(f'rank {rank}: {x}')\n"),
    ("HVD405", DDP + "from tqdm import tqdm\n", "for x in tqdm(xs, disable=rank != 0):\n f(x)\n"),
    (
        *("HVD406", DDP),
        "if rank == 0:\n MNIST('data', download=True)\ndist.barrier()\n"
        "data = MNIST('data', download=True)\n",
    ),
    ("HVD501", HVD, ""),
    ("HVD502", KERAS, "model.fit(x, y, verbose=0, callbacks=[state])\n"),
    (
        *("HVD503", HVD),
        "if hvd.rank() == 0:\n model.load_state_dict(torch.load('m.pt'))\n"
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
    ),
    ("HVD504", HVD, "for x in xs:\n    f(x).backward()\n    optimizer.step()\n"),
    ("HVD505", DDP, "for x in xs:\n    f(x).backward()\n    optimizer.step()\n"),
    ("HVD506", DDP, "model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)\n"),
    ("HVD506", METRICS, "a = t.Accuracy('binary')\nmap(h.allreduce, a.metric_state.values())\n"),
    ("HVD601", DDP, "dist.barrier()\nf()\ndist.barrier()\n"),
]
