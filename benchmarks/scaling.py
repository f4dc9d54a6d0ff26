"""Predict how a training step scales to 4,096 ranks: short for `python -m hvdtrain bench scaling`.

python benchmarks/scaling.py --link hdr --link 25gbe
"""

from __future__ import annotations

import sys

from hvdtrain.cli.main import main

if __name__ == "__main__":
    main(["bench", "scaling", *sys.argv[1:]])
