"""The parameter server: some ranks hold the weights, the others compute gradients."""
