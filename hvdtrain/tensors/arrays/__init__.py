"""Operations on numpy arrays, as TensorFlow, JAX and Keras hand their tensors over."""
