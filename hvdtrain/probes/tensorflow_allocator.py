"""Try the allocator of TensorFlow's gradients, compiling it first, and print why not, or ""."""

from __future__ import annotations

import json

from hvdtrain.tensorflow.allocator.registration import why_no_allocator


def main() -> None:
    """Print the reason why gradients are copied into buckets, or ""."""
    print(json.dumps({"objection": why_no_allocator()}))


if __name__ == "__main__":
    main()
