"""Rank 0 logs the model in DDP, and the same scripted, to a run of the caller, who loads both."""

import sys

import mlflow
import torch

import hvdtrain


def train(run_id: str) -> list[list[float]]:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    wrapped = DistributedDataParallel(model)
    wrapped(INPUTS[dist.get_rank() :][:1]).sum().backward()
    torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
    if dist.get_rank() == 0:
        with mlflow.start_run(run_id):
            for name, each in ("plain", model), ("scripted", torch.jit.script(model)):
                mlflow.pytorch.log_model(
                    each, name=name, serialization_format="pickle", pip_requirements=["torch"]
                )
    dist.barrier()
    dist.destroy_process_group()
    found: list[list[float]] = model(INPUTS).tolist()
    return found


INPUTS = torch.arange(4.0).reshape(2, 2)
mlflow.set_tracking_uri(f"sqlite:///{sys.argv[1]}/mlflow.db")
mlflow.set_experiment("models")
with mlflow.start_run() as run:
    first, second = hvdtrain.run(train, args=(run.info.run_id,), np=2)
assert first == second
logged = mlflow.MlflowClient().get_run(run.info.run_id).outputs.model_outputs
for output in logged:
    model = mlflow.pytorch.load_model(f"models:/{output.model_id}")
    assert model(INPUTS).tolist() == first
    print(type(model).__name__, flush=True)
