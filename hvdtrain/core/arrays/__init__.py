"""Operations on numpy arrays, for frameworks whose tensors are communicated as arrays."""
