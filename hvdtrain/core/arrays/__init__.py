"""Operations on numpy arrays, for frameworks whose tensors become arrays."""
