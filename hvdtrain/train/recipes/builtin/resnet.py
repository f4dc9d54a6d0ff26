"""Small residual networks (He et al., arXiv:1512.03385) without batch statistics.

They normalize groups of channels within each sample (Wu and He, arXiv:1803.08494), so that the
gradient of a batch is the mean over its samples, however the batch is split between ranks.
"""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = 8


def resnet(
    classes: int, width: int, stages: int, blocks: int, channels: int = 3, large: bool = False
) -> nn.Module:
    """Return a network that maps images [n, channels, height, width] to scores [n, classes]."""
    if large:
        stem = [_convolution(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    else:
        stem = [_convolution(channels, width, 3, 1), nn.ReLU()]
    body: list[nn.Module] = []
    inputs = width
    for stage in range(stages):
        outputs = width << stage
        for number in range(blocks):
            body.append(_Block(inputs, outputs, 2 if stage and not number else 1))
            inputs = outputs
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)]
    return nn.Sequential(*stem, *body, *head)


def _convolution(inputs: int, outputs: int, size: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.GroupNorm(math.gcd(_GROUPS, outputs), outputs),
    )


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride)
        self.second = _convolution(outputs, outputs, 3, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(images))) + self.shortcut(images))
