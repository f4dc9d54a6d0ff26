"""The gradient step: how gradients are cut into buckets, filled, exchanged and handed back."""
