"""What all strategies for Keras share: the recipe, the division of samples, `fit`."""
