"""The allocator of TensorFlow's memory on the CPU, which is registered before the first tensor."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from functools import cache
from pathlib import Path

import numpy as np
import tensorflow as tf

from hvdtrain.config import Config
from hvdtrain.core import context
from hvdtrain.core.allocators import (
    LEAST_BYTES,
    AllocatorError,
    BuildRecipe,
    GradientArena,
    Library,
    blocks_for,
    build,
)
from hvdtrain.world import promised_world


def recipe() -> BuildRecipe:
    flags = tf.sysconfig.get_compile_flags()
    headers = ["-isystem", tf.sysconfig.get_include()]  # which cause warnings
    return BuildRecipe(
        source=Path(__file__).with_name("gradient_allocator.cpp"),
        name=f"tensorflow{tf.__version__}",
        build=f"{tf.version.GIT_VERSION} {tf.version.COMPILER_VERSION}",
        flags=[*headers, *(flag for flag in flags if not flag.startswith("-I"))],
        libraries=tf.sysconfig.get_link_flags(),
    )


_logger = logging.getLogger("hvdtrain")


class TensorFlowLibrary(Library):
    """The calls of gradient_allocator.cpp."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        calls = self.calls
        calls.hvd_allocate.argtypes, calls.hvd_allocate.restype = [ctypes.c_uint64], ctypes.c_void_p
        calls.hvd_deallocate.argtypes, calls.hvd_deallocate.restype = [ctypes.c_void_p], None
        self._allocate, self._deallocate = calls.hvd_allocate, calls.hvd_deallocate
        if not calls.hvd_register():
            raise AllocatorError("TensorFlow has made tensors before init()")

    def objection(self) -> str:
        """Return why TensorFlow's memory does not come from arenas, or ""; its choice is final."""
        blocks = blocks_for([LEAST_BYTES])
        assert blocks is not None
        arena = GradientArena(self, np.frombuffer(mmap.mmap(-1, blocks.nbytes), np.uint8), blocks)
        first = self._allocate(LEAST_BYTES)
        arena.miss(first)
        block = self._allocate(LEAST_BYTES)
        self._deallocate(first)
        served = block is not None and arena.offset(block) is not None
        self._deallocate(block)
        if not served:
            return "TensorFlow has chosen another allocator"
        return "its blocks are not returned" if arena.used else ""


def register_allocator() -> None:
    """Let TensorFlow allocate gradients in memory of the node later; compiles, in seconds."""
    world = promised_world(os.environ)
    if world is None or world.size == 1:
        return
    config = Config.from_environ(os.environ)
    if config.tensorflow_allocator and config.shared_memory == "1":
        _registered()


def find_library() -> TensorFlowLibrary | None:
    """Return the registered allocator, tried on the first call; None if there is none."""
    if not context.current().config.tensorflow_allocator:
        return None
    why = why_no_allocator()
    if why:
        _logger.debug("gradients are copied into buckets: %s", why)
    return None if why else _registered()[0]


@cache
def why_no_allocator() -> str:
    """Return why there is no usable allocator, or "" if there is one."""
    library, why = _registered()
    return why if library is None else library.objection()


@cache
def _registered() -> tuple[TensorFlowLibrary | None, str]:
    if tf.config.get_visible_devices("GPU"):
        return None, "TensorFlow makes gradients on a GPU"
    try:
        return TensorFlowLibrary(build(recipe(), os.environ)), ""
    except AllocatorError as error:
        return None, str(error)
    except (AttributeError, OSError) as error:  # of another TensorFlow
        return None, f"it does not work with TensorFlow {tf.__version__}: {error}"
