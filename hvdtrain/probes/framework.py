"""Import a framework: `python -m hvdtrain.probes.framework torch|tensorflow|jax`."""

from __future__ import annotations

import json
import sys


def main(name: str) -> None:
    """Print the framework's version and the number of GPUs that it finds."""
    if name == "torch":
        import torch

        version = torch.__version__
        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif name == "tensorflow":
        import tensorflow

        version = tensorflow.__version__
        gpus = len(tensorflow.config.list_physical_devices("GPU"))
    elif name == "jax":
        import jax

        version = jax.__version__
        gpus = sum(device.platform == "gpu" for device in jax.devices())
    else:
        raise ValueError(f"unknown framework {name!r}")
    print(json.dumps({"version": str(version), "gpus": gpus}))


if __name__ == "__main__":
    main(*sys.argv[1:])
