"""Metrics that are the same on any number of ranks."""

from hvdtrain.train.metrics.exact import (
    Accuracy,
    ConfusionMatrix,
    Gathered,
    MeanOf,
    Metric,
    TopK,
)

__all__ = ["Accuracy", "ConfusionMatrix", "Gathered", "MeanOf", "Metric", "TopK"]
