#!/usr/bin/env bash
# PyTorch 2.13.0: on CPUs, GroupNorm of tensors in channels_last is wrong where the mean is large beside the deviation.
#
# Seen with torch 2.13.0 (CPU), Python 3.11: channels_last is a layout of memory, and layers return the same with it.
# GroupNorm takes the variance there as the mean of squares minus the square of the mean, in float32: with a deviation
# of 1 and a mean of 100 the third digit is wrong, with 1000 the first, and with 10,000 the result is of order 100
# instead of 1. In the usual layout it is right, and so are BatchNorm and InstanceNorm in both. Networks are put to
# channels_last for speed, ranks with other hardware or options then compute other models, and evaluation of a trained
# one in the other layout differs. Nothing is said; on a GPU this was not tried.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" -W error - <<'PYTHON'
import torch

assert torch.__version__.startswith("2.13.0"), torch.__version__
LAYERS = {
    "GroupNorm": torch.nn.GroupNorm(2, 8),
    "BatchNorm": torch.nn.BatchNorm2d(8),
    "InstanceNorm": torch.nn.InstanceNorm2d(8),
}


def errors(layer, images):
    """Return the largest error with the usual layout and with channels_last."""
    right = layer.double()(images.double())
    layer.float()
    return [
        (layer(images.to(memory_format=layout)) - right).abs().max().item()
        for layout in (torch.contiguous_format, torch.channels_last)
    ]


for name, layer in LAYERS.items():
    for mean, at_least in ((0, 0), (100, 1e-3), (1000, 0.1), (10_000, 10)):
        images = torch.randn(2, 8, 16, 16, generator=torch.Generator().manual_seed(0)) + mean
        usual, last = errors(layer, images)
        print(f"{name}, mean {mean}, deviation 1: largest error {usual:.1e}, in channels_last {last:.1e}")
        assert usual < 5e-3, "changed: the usual layout"
        if name == "GroupNorm" and mean:
            assert last > at_least, "changed: channels_last"
        else:
            assert last < 5e-3, f"changed: {name}"
PYTHON
