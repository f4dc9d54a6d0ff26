"""The models that benchmarks train with torch on random data, and a training step of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

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
    """The network for ImageNet: 25.6 million parameters, for images of any size.

    He et al., arXiv:1512.03385, with the stride in the 3x3 convolution.
    """

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


_VOCABULARY, _TOKENS, _WIDTH = 8192, 32, 512
_CLASSES = 1000


@dataclass(frozen=True)
class BenchModel:
    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]
    classes: int
    batch: int  # samples per rank
    targets_per_sample: int = 1  # number of tokens of a sequence; 1 otherwise
    # Whether n ranks take the same step as one rank with the whole batch; not with batch
    # normalization, which sees a rank's own samples, or with dropout.
    exact: bool = True

    def make_batch(self, samples: int, seed: int) -> tuple[Tensor, Tensor]:
        """Return inputs [samples, ...] and targets [samples * targets_per_sample]."""
        generator = torch.Generator().manual_seed(seed)
        inputs = self.inputs(samples, generator)
        count = samples * self.targets_per_sample
        return inputs, torch.randint(self.classes, (count,), generator=generator)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of scores [..., classes], a scalar."""
        return F.cross_entropy(outputs.reshape(-1, self.classes), targets)


class BenchTransformer(nn.Module):
    """A language model of six layers: 27.3 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, _WIDTH)
        self.places = nn.Embedding(_TOKENS, _WIDTH)
        layer = nn.TransformerEncoderLayer(
            _WIDTH, nhead=8, dim_feedforward=4 * _WIDTH, dropout=0.0, batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers=6)
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [samples, tokens, vocabulary] for tokens [samples, tokens]."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(tokens) + self.places.weight[:length]
        scores: Tensor = self.head(self.layers(hidden, mask=mask, is_causal=True))
        return scores


class SmallViT(nn.Module):
    """ViT-S (Touvron et al., arXiv:2012.12877): 21.8 million parameters, in patches of 8 x 8."""

    def __init__(self, classes: int = _CLASSES) -> None:
        super().__init__()
        width, patch, pixels = 384, 8, 64
        self.patches = nn.Conv2d(3, width, patch, stride=patch)
        self.places = nn.Parameter(torch.zeros((pixels // patch) ** 2, width))
        layer = nn.TransformerEncoderLayer(
            width, 6, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 12, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return scores [samples, classes] for images [samples, 3, 64, 64]."""
        hidden = self.patches(images).flatten(2).transpose(1, 2) + self.places
        scores: Tensor = self.head(self.layers(hidden).mean(dim=1))
        return scores


def _mnist_cnn() -> nn.Module:
    """Return the network of PyTorch's MNIST example: 1.2 million parameters, with dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU()),
        *(nn.Dropout(0.5), nn.Linear(128, 10)),
    )


def _mlp() -> nn.Module:
    hidden = [layer for _ in range(5) for layer in (nn.Linear(2048, 2048), nn.ReLU(inplace=True))]
    return nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), *hidden, nn.Linear(2048, 1024))


def small_mlp() -> nn.Module:
    """Return a network of 2.9 million parameters, for 784 inputs and 10 classes."""
    hidden = [layer for _ in range(2) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), *hidden, nn.Linear(1024, 10))


def _images(*shape: int) -> Callable[[int, torch.Generator], Tensor]:
    return lambda samples, generator: torch.randn(samples, *shape, generator=generator)


def _sentences(samples: int, generator: torch.Generator) -> Tensor:
    return torch.randint(_VOCABULARY, (samples, _TOKENS), generator=generator)


MODELS = {
    "mlp": BenchModel("MLP, 25.2 M", _mlp, _images(1024), 1024, batch=16),
    "transformer": BenchModel(
        "transformer, 27.3 M",
        BenchTransformer,
        _sentences,
        _VOCABULARY,
        batch=4,
        targets_per_sample=_TOKENS,
    ),
    "resnet50": BenchModel(
        "ResNet-50, 25.6 M", ResNet50, _images(3, 64, 64), _CLASSES, batch=4, exact=False
    ),
    "vit-s": BenchModel("ViT-S, 21.8 M", SmallViT, _images(3, 64, 64), _CLASSES, batch=4),
    "mnist-cnn": BenchModel(
        "MNIST CNN, 1.2 M", _mnist_cnn, _images(1, 28, 28), 10, batch=64, exact=False
    ),
}


# Returns the module to call and the optimizer to step, for a model.
Wrap = Callable[[nn.Module], tuple[nn.Module, Optimizer]]

_SEED = 1
_PIECE = 1 << 20


def first_weights(model: BenchModel) -> list[torch.Tensor]:
    """Return the weights with which every trainer starts, equal on all ranks."""
    torch.manual_seed(_SEED)
    return [parameter.detach().clone() for parameter in model.build().parameters()]


def bare(module: nn.Module) -> tuple[nn.Module, Optimizer]:
    return module, bare_optimizer(module)


def bare_optimizer(module: nn.Module, kind: str = "sgd", fused: bool | None = None) -> Optimizer:
    if kind == "adam":
        return Adam(module.parameters(), lr=1e-4, fused=fused)
    return SGD(module.parameters(), lr=0.01, momentum=0.9, fused=fused)


class Trainer:
    module: nn.Module
    optimizer: Optimizer

    def __init__(
        self,
        model: BenchModel,
        weights: list[torch.Tensor],
        batch: tuple[torch.Tensor, torch.Tensor],
        wrap: Wrap,
        seed: int,
    ) -> None:
        self._model, self._weights, self._seed = model, weights, seed
        self._inputs, self._targets = batch
        self._wrap = wrap  # adds the library, when the first turn begins
        self.parameters: list[nn.Parameter] = []  # none before the first restart

    def restart(self) -> None:
        """Restore the first weights, with a new optimizer."""
        if not self.parameters:
            self.module, self.optimizer = self._wrap(self._model.build())
            # torch's replicate makes DTensors, each of them whole on every rank.
            weights = self.module.parameters()
            self.parameters = [getattr(weight, "_local_tensor", weight) for weight in weights]
        with torch.no_grad():
            for parameter, weight in zip(self.parameters, self._weights, strict=True):
                parameter.copy_(weight)
        self.optimizer.state.clear()
        torch.manual_seed(self._seed)

    def loss(self) -> torch.Tensor:
        return self._model.loss(self.module(self._inputs), self._targets)

    def step(self, between: Callable[[], object] = int) -> None:
        """Train one step; call a function before the optimizer takes it."""
        self.optimizer.zero_grad()
        self.loss().backward()
        between()
        self.optimizer.step()

    def moved(self) -> float:
        """Return sum |w - w_0| over all weights: the distance that training has moved them.

        Gradients are freed, so that those of the next contender may lie in their memory.
        """
        total = 0.0
        for parameter, weight in zip(self.parameters, self._weights, strict=True):
            parameter.grad = None
            now, then = parameter.detach().view(-1), weight.view(-1)
            for start in range(0, now.numel(), _PIECE):
                piece = slice(start, start + _PIECE)
                total += float((now[piece].double() - then[piece].double()).abs().sum())
        return total
