"""How gradients of each of Keras's backends are reduced."""
