"""Parts of compressed exchanges: error feedback, codes of few bits, the largest elements."""
