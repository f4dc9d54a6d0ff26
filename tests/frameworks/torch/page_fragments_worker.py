"""Runs what pages show of a script: with names that such a script has, and a step after it."""

import os
from pathlib import Path
from typing import Any

import torch
from page_blocks import ROOT, blocks
from safetensors.torch import save_file
from torch import nn

import hvdtrain.torch as hvd

# Pages of docs/, of which the first block is run.
FRAGMENTS = ("checkpoints.md", "numerics.md", "sharded.md", "timeline.md")


def names_of_a_script() -> dict[str, Any]:
    torch.manual_seed(1)
    model = nn.Linear(8, 4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(shard: int) -> torch.Tensor:
        return model(torch.full([2, 8], float(shard))).square().mean()

    given = {"hvd": hvd, "torch": torch, "model": model, "inner": inner}
    return {**given, "loss_of": loss_of, "optimizer": inner}


def run(page: str, names: dict[str, Any]) -> None:
    code = blocks(ROOT / page, "python")[0]
    before = names["optimizer"]
    exec(compile(code, page, "exec"), names)
    if names["optimizer"] is not before and "sharded" not in code:
        names["model"](torch.ones(2, 8)).sum().backward()
        names["optimizer"].step()
    print(f"ran {page}", flush=True)


def main() -> None:
    hvd.init()
    folder = Path(f"rank-{hvd.rank()}")
    folder.mkdir()
    os.chdir(folder)
    weights = {f"model/{name}": value for name, value in nn.Linear(8, 4).state_dict().items()}
    save_file(weights, "checkpoint-0003-9f2c51d07a4be816.safetensors")
    for page in FRAGMENTS:
        run(f"docs/{page}", names_of_a_script())
    names = names_of_a_script()
    names["optimizer"] = names["inner"]
    exec(blocks(ROOT / "docs/exchanges.md", "python")[1], names)
    run("docs/exchanges.md", {**names, "MyExchange": names["MeanOfSigns"]})


main()
