"""A small character-level transformer on a text file.

It is decoder-only (Vaswani et al., arXiv:1706.03762), with pre-normalization.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.data.characters import load_text
from hvdtrain.errors import UsageError
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipe import Recipe
from hvdtrain.train.recipes.parts import cross_entropy


class Transformer(nn.Module):
    """Predicts scores for the token that follows each token of a window."""

    def __init__(self, vocabulary: int, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise UsageError(f"width must be a multiple of heads, got {width} and {heads}")
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.layers = nn.Sequential(*(_Layer(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores [n, vocabulary, length] for tokens [n, length]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.layers(self.tokens(tokens) + self.places(positions))
        scores: Tensor = self.head(self.norm(hidden))
        # torch's losses and metrics expect the classes in dimension 1.
        return scores.transpose(1, 2)


class _Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.think = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attention(self.norm_1(hidden))
        change: Tensor = self.think(self.norm_2(hidden))
        return hidden + change

    def _attention(self, hidden: Tensor) -> Tensor:
        count, length, width = hidden.shape
        # [n, length, 3 * width] -> three times [n, heads, length, width / heads]
        parts = self.attend(hidden).view(count, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        projected: Tensor = self.project(mixed.transpose(1, 2).reshape(count, length, width))
        return projected


def recipe(
    data_dir: Path | None = None,
    file: str = "",
    context: int = 64,
    width: int = 64,
    layers: int = 2,
    heads: int = 4,
    label_smoothing: float = 0.0,
) -> Recipe:
    """Return a network that maps characters [n, context] to scores of the character after each."""
    text = load_text(data_dir, context, file)
    return Recipe(
        model=Transformer(len(text.vocabulary), context, width, layers, heads),
        train=text.train,
        test=text.test,
        loss=cross_entropy(label_smoothing),
        metrics={"accuracy": Accuracy()},
        classes=text.vocabulary,
    )
