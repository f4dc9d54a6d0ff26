"""A small character-level transformer on a text file."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.data.characters import load_text
from hvdtrain.train.metrics import Accuracy
from hvdtrain.train.recipes.builtin.parts import cross_entropy
from hvdtrain.train.recipes.builtin.transformer import Transformer
from hvdtrain.train.recipes.recipe import Recipe


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
