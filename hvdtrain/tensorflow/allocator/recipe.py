"""How the allocator is compiled against the headers of the installed TensorFlow."""

from __future__ import annotations

from pathlib import Path

import tensorflow as tf

from hvdtrain.core.allocators.build import Recipe


def recipe() -> Recipe:
    """Return how the allocator is compiled."""
    flags = tf.sysconfig.get_compile_flags()
    headers = ["-isystem", tf.sysconfig.get_include()]  # which cause warnings
    return Recipe(
        source=Path(__file__).with_name("gradient_allocator.cpp"),
        name=f"tensorflow{tf.__version__}",
        build=f"{tf.version.GIT_VERSION} {tf.version.COMPILER_VERSION}",
        flags=[*headers, *(flag for flag in flags if not flag.startswith("-I"))],
        libraries=tf.sysconfig.get_link_flags(),
    )
