"""All-reduce training on MPI with Horovod's interface.

This package loads neither MPI nor a framework: `import hvdtrain.torch` does.
"""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
