"""What all strategies for torch share: the recipe, the division of samples, the loop."""
