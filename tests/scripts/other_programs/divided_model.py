"""torch divides a model among two ranks in three ways, as docs/limits.md says."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

torch.distributed.init_process_group("gloo")
rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
mesh = init_device_mesh("cpu", (size,))
torch.manual_seed(0)
layers = torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1)
model, rows = torch.nn.Sequential(*layers), torch.ones(4, 8)
expected = model(rows)

sharded = copy.deepcopy(model)
fully_shard(sharded, mesh=mesh)
plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
split = parallelize_module(copy.deepcopy(model), mesh, plan)
for other in (sharded, split):
    torch.testing.assert_close(other(rows), expected)
part = model[:2] if rank == 0 else model[2:]
schedule = ScheduleGPipe(PipelineStage(part, rank, size, torch.device("cpu")), 2)
outputs = schedule.step(*([rows] if rank == 0 else []))
if rank:
    torch.testing.assert_close(outputs, expected)
    print("divided in three ways")
torch.distributed.destroy_process_group()
