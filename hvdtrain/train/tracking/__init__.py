"""Where metrics go beside metrics.jsonl: a CSV file, TensorBoard, MLflow, Weights & Biases."""
