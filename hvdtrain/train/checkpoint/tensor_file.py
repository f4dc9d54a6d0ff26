"""Tensors of torch or numpy in a safetensors file, which holds no code.

The format: the length of the header in 8 bytes, the header in JSON, and the tensors' bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np

_TENSOR, _TUPLE, _DICT, _FLOAT = "$tensor", "$tuple", "$dict", "$float"
# Reserved by the header of safetensors files.
_RESERVED = "__metadata__"


def flatten(content: Any) -> tuple[dict[str, Any], Any]:
    """Separate content into its tensors and a skeleton."""
    tensors: dict[str, Any] = {}
    return tensors, _flatten(content, (), tensors)


def unflatten(skeleton: Any, tensors: Mapping[str, Any]) -> Any:
    """Rebuild the content that flatten() has separated."""
    if isinstance(skeleton, list):
        return [unflatten(item, tensors) for item in skeleton]
    if not isinstance(skeleton, dict):
        return skeleton
    tag = next(iter(skeleton), "")
    if not tag.startswith("$"):
        return {key: unflatten(value, tensors) for key, value in skeleton.items()}
    ((_, value),) = skeleton.items()
    if tag == _TENSOR:
        return tensors[value]
    if tag == _TUPLE:
        return tuple(unflatten(item, tensors) for item in value)
    if tag == _DICT:
        return {key: unflatten(item, tensors) for key, item in value}
    if tag == _FLOAT:
        return float(value)
    raise ValueError(f"unknown tag {tag!r}")


def _flatten(value: Any, path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: repr(value)}
    if isinstance(value, Mapping):
        return _flatten_dict(value, path, tensors)
    if isinstance(value, (list, tuple)):
        items = [_flatten(v, (*path, str(i)), tensors) for i, v in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        name = _unused_name(path, tensors)
        tensors[name] = value
        return {_TENSOR: name}
    raise TypeError(
        f"{'/'.join(path)} is a {type(value).__name__}, which a checkpoint cannot hold: use "
        "tensors, numbers, strings, and lists and dicts of them"
    )


def _flatten_dict(value: Mapping[Any, Any], path: tuple[str, ...], tensors: dict[str, Any]) -> Any:
    for key in value:
        if not isinstance(key, (str, int)):
            raise TypeError(
                f"{'/'.join(path)} has the key {key!r}: a checkpoint holds strings and integers"
            )
    items = [(key, _flatten(v, (*path, str(key)), tensors)) for key, v in value.items()]
    if all(isinstance(key, str) and not key.startswith("$") for key in value):
        return dict(items)
    return {_DICT: [[key, item] for key, item in items]}


def _unused_name(path: tuple[str, ...], tensors: Mapping[str, Any]) -> str:
    # Half of a surrogate pair, which Python's strings may hold, cannot be encoded.
    name = plain = "/".join(path).encode("utf-8", "backslashreplace").decode()
    number = 1
    while name in tensors or name == _RESERVED:
        number += 1
        name = f"{plain}#{number}"
    return name


# The library of tensors, as safetensors names them: torch or numpy.
TensorLibrary = Literal["pt", "np"]

# The format's names of the types of torch and numpy.
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
# safetensors cannot read these as arrays of numpy.
_NOT_OF_NUMPY = {"float8_e4m3fn", "float8_e5m2"}
_ALIGNMENT_BYTES = 8
# Large pieces, so that writing seldom takes the GIL from the thread that trains.
_PIECE_BYTES = 16 << 20


def holds(kind: str) -> bool:
    """Return whether the format has a type of elements, as torch or numpy names it."""
    return kind in _TYPES


def write(file: BinaryIO, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
    """Write tensors and metadata, and return the SHA-256 of all bytes.

    safetensors' own writer (0.8) releases the GIL and copies nothing, as this does, but it takes no
    open file and returns no digest: what it has written would have to be read again.
    """
    # Larger elements first, so that each tensor is aligned for its type.
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
    """Return the tensors, in CPU memory of their own, and the metadata."""
    from safetensors import safe_open

    with safe_open(path, framework=library) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        # torch's tensors map the file, which may be removed while an optimizer still uses them.
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
    """Return a view of a tensor's bytes, copied to host memory if it is not contiguous there."""
    if not isinstance(tensor, np.ndarray):
        import torch

        tensor = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        tensor = tensor.reshape(-1).view(torch.uint8).numpy()
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
