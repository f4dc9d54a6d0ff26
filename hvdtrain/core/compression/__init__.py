"""Parts of compressed exchanges: codes of few bits, the largest elements, orthonormal rows."""
