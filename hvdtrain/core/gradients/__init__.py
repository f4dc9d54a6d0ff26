"""The gradient step: bucket plans, and the exchange of gradients bucket by bucket."""
