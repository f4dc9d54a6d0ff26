"""Numbers as codes of few bits: blocks of elements, their codes, and messages of codes."""
