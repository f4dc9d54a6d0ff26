"""Operations of Horovod on values and variables of Keras."""
