"""The core: context, named operations, agreement and the gradient step."""
