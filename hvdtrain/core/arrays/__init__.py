"""Operations on numpy arrays, for frameworks whose tensors are converted to arrays."""
