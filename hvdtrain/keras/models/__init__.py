"""What compile and fit of Keras models do on several ranks."""
