"""Tensors of torch or numpy in a safetensors file: no code is in it, and none runs to read it.

The format: the length of the header in 8 bytes, the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

__all__ = ["TensorLibrary", "read", "write"]

# Of which library tensors are: torch or numpy.
TensorLibrary = Literal["pt", "np"]

# What the format calls the types of torch and numpy.
_TYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
# safetensors makes no arrays of these, so they could not be read again.
_NOT_OF_NUMPY = {"float8_e4m3fn", "float8_e5m2"}
_ALIGNMENT_BYTES = 8
# Few enough pieces that the thread which trains is seldom asked for Python's lock.
_PIECE_BYTES = 16 << 20


def write(file: BinaryIO, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Write tensors by name, and texts by theirs; return the SHA-256 of all bytes.

    safetensors' own writer (0.8) releases Python's lock and copies nothing, as this does. But it
    takes no open file and tells no digest: what it has written had to be read again for that.

    Raises:
        TypeError: a tensor has a type that the format does not know.
    """
    # Larger elements first, so that each tensor begins where its type wants to.
    names = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
    header = _header(names, tensors, metadata)
    digest = hashlib.sha256()

    def put(data: memoryview) -> None:
        for start in range(0, len(data), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            digest.update(piece)
            file.write(piece)

    put(memoryview(len(header).to_bytes(8, "little") + header))
    for name in names:
        put(_bytes_of(tensors[name]))
    return digest.hexdigest()


def read(path: Path, library: TensorLibrary) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the tensors, in CPU memory of their own, and the texts.

    Raises:
        OSError, SafetensorError: it cannot be read, or is malformed.
        ModuleNotFoundError: safetensors is not installed.
    """
    from safetensors import safe_open

    with safe_open(path, framework=library) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # Those of torch show the file, which may be removed while an optimizer still has them.
        own = {name: t.clone() if library == "pt" else t for name, t in tensors.items()}
        return own, file.metadata() or {}


def _header(names: list[str], tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in names:
        tensor = tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        if kind not in _TYPES or (isinstance(tensor, np.ndarray) and kind in _NOT_OF_NUMPY):
            raise TypeError(f"{name} has elements of type {kind}, which a checkpoint cannot hold")
        end = start + prod(tensor.shape) * tensor.dtype.itemsize
        entry = {"dtype": _TYPES[kind], "shape": list(tensor.shape), "data_offsets": [start, end]}
        entries[name] = entry
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)


def _bytes_of(tensor: Any) -> memoryview:
    """Return a view of a tensor's bytes, of a copy where it does not lie in one piece here."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
