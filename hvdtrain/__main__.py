"""Entry point of `python -m hvdtrain`."""

from __future__ import annotations

from hvdtrain.cli.main import main

if __name__ == "__main__":
    main()
