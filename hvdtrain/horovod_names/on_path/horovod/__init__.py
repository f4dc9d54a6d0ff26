"""What `import horovod` gives where hvdtrain answers for it."""

from __future__ import annotations

import sys

from hvdtrain.horovod_names.finder import HorovodFinder

__all__ = ["__version__"]

# Of the Horovod whose interface this is.
__version__ = "0.28.1"

sys.meta_path.insert(0, HorovodFinder(sys.modules[__name__]))
