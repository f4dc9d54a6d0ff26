"""Ignite with its Horovod backend: ignite_training.py RESULTS."""

import json
import sys
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from curve import build, data
from ignite.engine import create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import MeanSquaredError
from torch.utils.data import DataLoader

from hvdtrain.data import EvaluationSampler


def training(_: int, folder: str) -> None:
    rank, size = idist.get_rank(), idist.get_world_size()
    loader = idist.auto_dataloader(data(), batch_size=12, shuffle=False)
    model = build()
    with torch.no_grad():
        next(model.parameters()).add_(rank)  # those of rank 0 count
    model = idist.auto_model(model)
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1))
    create_supervised_trainer(model, optimizer, torch.nn.functional.mse_loss).run(loader, 2)
    evaluator = create_supervised_evaluator(model, {"error": MeanSquaredError()})
    tests = data(23)
    sampler = EvaluationSampler(len(tests))  # without padding
    found = evaluator.run(DataLoader(tests, 4, sampler=sampler)).metrics["error"]
    group = idist.new_group([0, 1]) if size > 2 else None
    result: dict[str, Any] = {
        "backend": idist.backend(),
        "weights": torch.cat([p.detach().flatten() for p in model.parameters()]).tolist(),
        "error": found,
        "largest": idist.all_reduce(float(rank), op="MAX"),
        "gathered": idist.all_gather(rank),
        "group": idist.all_gather(torch.tensor([rank]), group=group).tolist(),
        "sent": idist.broadcast(f"from {rank}", src=size - 1),
    }
    idist.barrier()
    Path(folder, f"{rank}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(training, sys.argv[1])
