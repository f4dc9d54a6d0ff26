"""Parts of compressed exchanges: error feedback, half types, few bits, the largest elements."""
