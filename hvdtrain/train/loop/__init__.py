"""What the training loops of all frameworks share."""
