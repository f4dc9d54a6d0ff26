"""Runs the code of docs/data.md that is for torch."""

from typing import Any

import numpy as np
import torch
from data_page import run_block, trained
from ranks import report


def check_loop() -> list[Any]:
    """Return the weights, once they are those of one rank with whole batches."""
    names = run_block("optimizer.sample_weight = count")
    inputs, targets = (tensor.numpy() for tensor in names["data"].tensors)
    torch.manual_seed(0)
    torch.randn(1000, 4), torch.randn(1000, 1)
    first = [p.detach().numpy() for p in torch.nn.Linear(4, 1).parameters()]
    expected = trained([first[0].T, first[1]], inputs, targets)
    weights, bias = [p.detach().numpy() for p in names["model"].parameters()]
    np.testing.assert_allclose(weights.T, expected[0], atol=1e-5)
    np.testing.assert_allclose(bias, expected[1], atol=1e-5)
    errors = inputs @ weights.T + bias - targets
    assert names["number"] == 1000
    np.testing.assert_allclose(names["total"], (errors**2).sum(), rtol=1e-5)
    assert names["position"] == {"epoch": 3, "consumed": 0, "samples": 1000, "seed": 1}
    return [weights.tolist(), bias.tolist()]


def check_streams_and_changes() -> None:
    assert run_block("class Squares")["seen"] == sum(n**2 for n in (2, 3, 6, 7, 9))
    names = run_block("class Flipped")
    drawn, sampler, data = names["drawn"], names["sampler"], names["data"]
    for epoch in (1, 0):
        data.epoch = epoch
        sampler.set_epoch(epoch)
        for images, rows in zip(drawn[epoch], sampler, strict=True):
            assert np.array_equal(images, np.stack([data[row][0] for row in rows]))
    assert not np.array_equal(drawn[0][0], drawn[1][0])


weights = check_loop()
check_streams_and_changes()
report(2, weights)
