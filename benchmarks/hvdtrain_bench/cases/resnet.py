"""ResNet-50 (He et al., arXiv:1512.03385) with the stride in the 3x3 convolution."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_BLOCKS = (3, 4, 6, 3)
_WIDENING = 4


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = _WIDENING * width
        self.narrow = _convolution(inputs, width, 1)
        self.middle = _convolution(width, width, 3, stride)
        self.wide = _convolution(width, outputs, 1)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(inputs, outputs, 1, stride)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.middle(F.relu(self.narrow(images))))
        return F.relu(self.wide(hidden) + self.shortcut(images))


class ResNet50(nn.Module):
    """The network for ImageNet: 25.6 million parameters, for images of any size."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem = _convolution(3, 64, 7, stride=2)
        blocks, inputs = [], 64
        for stage, count in enumerate(_BLOCKS):
            width = 64 << stage
            for number in range(count):
                blocks.append(_Bottleneck(inputs, width, 2 if stage and not number else 1))
                inputs = _WIDENING * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [samples, classes] for images [samples, 3, height, width]."""
        hidden = F.max_pool2d(F.relu(self.stem(images)), 3, stride=2, padding=1)
        scores: Tensor = self.head(self.blocks(hidden).mean(dim=(2, 3)))
        return scores
