"""The environment with Horovod, which `make test-all` builds where a C++ compiler is."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from environments import named_python
from ranks import packages_of

from hvdtrain.compiled import COMPILERS


def horovod_python() -> Path:
    if not os.environ.get("HVDTRAIN_HOROVOD_PYTHON"):
        require_compiler()
    return named_python("HVDTRAIN_HOROVOD_PYTHON", "Horovod")


def beside_horovod() -> dict[str, str]:
    """Return what has ranks of another environment find this Horovod, and use it as engine."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    asked = [str(horovod_python()), "-c", code]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=600, check=True)
    return {"HVDTRAIN_ENGINE": "horovod", **packages_of(found.stdout.strip())}


def require_compiler() -> None:
    if not any(map(shutil.which, COMPILERS)):
        pytest.skip(f"no C++ compiler ({', '.join(COMPILERS)}), so Horovod cannot be built")
