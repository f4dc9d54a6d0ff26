"""Load the compiled kernel with which ranks of a node add, and print why it is not used, or ""."""

from __future__ import annotations

import json

from hvdtrain.engines.shared_memory.kernel import why_no_kernel


def main() -> None:
    """Print the reason why the kernel is not used, or ""."""
    print(json.dumps({"objection": why_no_kernel()}))


if __name__ == "__main__":
    main()
