"""Checkpoints: what a run has to keep to continue, in files that are whole or not there at all.

They are safetensors files, which hold no code: the length of the header in 8 bytes, the header in
JSON, and the bytes of the tensors of torch or numpy.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, Self

import numpy as np

from hvdtrain.errors import UsageError
from hvdtrain.files import publish, replacing, unfinished_file
from hvdtrain.milestones import SAVED, report

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


def write_tensors(file: BinaryIO, tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> str:
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


def read_tensors(path: Path, library: TensorLibrary) -> tuple[dict[str, Any], dict[str, str]]:
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
        end = start + math.prod(tensor.shape) * tensor.dtype.itemsize
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


CHECKPOINT, BEST = "checkpoint", "best"
DIGEST_LENGTH = 16

# Sorts before the position of every checkpoint.
NO_POSITION = (-1, 0)

_PATTERN = re.compile(
    rf"({CHECKPOINT}|{BEST})-(\d+)(?:\+(\d+))?-([0-9a-f]{{{DIGEST_LENGTH}}})\.safetensors"
)


@dataclass(frozen=True)
class CheckpointName:
    """The name of a checkpoint file, parsed."""

    kind: str
    epoch: int
    samples: int
    digest: str

    @classmethod
    def of(cls, path: Path) -> Self | None:
        """Parse the name of a path; return None if it is not that of a checkpoint."""
        found = _PATTERN.fullmatch(path.name)
        if found is None:
            return None
        return cls(found[1], int(found[2]), int(found[3] or 0), found[4])

    @property
    def position(self) -> tuple[int, int]:
        """Epochs and samples done, which order checkpoints."""
        return self.epoch, self.samples

    def __str__(self) -> str:
        position = f"{self.epoch:04d}+{self.samples}" if self.samples else f"{self.epoch:04d}"
        return f"{self.kind}-{position}-{self.digest}.safetensors"


def position_of(path: Path) -> tuple[int, int]:
    """Return the epochs and samples in a checkpoint's name; -1 epochs if it has another name."""
    name = CheckpointName.of(path)
    return NO_POSITION if name is None else name.position


# Metadata of the file: everything that is not a tensor.
_ABOUT, _VERSION = "hvdtrain", 1


def write_checkpoint(
    directory: Path, epoch: int, samples: int, content: Mapping[str, Any], library: TensorLibrary
) -> Path:
    """Write a checkpoint and flush it to the disk; if it fails, no part of it stays."""
    tensors, skeleton = flatten(content)
    about = json.dumps({"version": _VERSION, "content": skeleton}, allow_nan=False)
    with unfinished_file(directory) as file:
        digest = write_tensors(file, tensors, {"format": library, _ABOUT: about})
        path = directory / str(CheckpointName(CHECKPOINT, epoch, samples, digest[:DIGEST_LENGTH]))
        publish(file, path)
    return path


def load_checkpoint(path: Path, library: TensorLibrary) -> dict[str, Any]:
    """Read a checkpoint into CPU memory; no code in it is run (rank 0 only)."""
    try:
        if path.is_dir():
            raise UsageError(
                f"--resume {path} is a directory: resume it with --resume auto --out {path}, or "
                "name a checkpoint in it"
            )
        if not path.is_file():
            raise UsageError(f"there is no checkpoint {path}: name an existing file")
        name = CheckpointName.of(path)
        if name is not None and _digest(path) != name.digest:
            raise ValueError("its content is not what was written")
        content = _content(path, library)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        raise UsageError(f"checkpoint {path} needs {error.name}, which is not installed") from error
    except OSError as error:
        raise UsageError(
            f"checkpoint {path} cannot be read ({error.strerror or error}): name another with "
            "--resume"
        ) from error
    except Exception as error:  # damaged files raise a dozen types of errors
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UsageError(f"checkpoint {path} is damaged: {reason}") from error
    if isinstance(content, dict) and "epoch" in content and isinstance(content.get("model"), dict):
        return content
    raise UsageError(f"{path} is not a checkpoint of hvdtrain")


def _content(path: Path, library: TensorLibrary) -> Any:
    tensors, metadata = read_tensors(path, library)
    if _ABOUT not in metadata:
        return None
    about = json.loads(metadata[_ABOUT])
    if about["version"] != _VERSION:
        raise UsageError(
            f"checkpoint {path} has format version {about['version']}, but this hvdtrain knows "
            f"version {_VERSION}: use the hvdtrain that wrote it"
        )
    return unflatten(about["content"], tensors)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:DIGEST_LENGTH]


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint and its content."""

    path: Path | None = None
    content: dict[str, Any] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)


def checkpoint_files(directory: Path) -> list[Path]:
    """Return the checkpoints of a run except the best, newest first."""
    return [path for path, name in _files(directory) if name.kind == CHECKPOINT]


def best_file(directory: Path) -> Path | None:
    """Return the best checkpoint of a run, or None."""
    return next((path for path, name in _files(directory) if name.kind == BEST), None)


def newest_good(
    directory: Path, library: TensorLibrary, later_than: tuple[int, int] = NO_POSITION
) -> LoadedCheckpoint:
    """Read the newest checkpoint that is not damaged, which may be the best one (rank 0 only)."""
    found = LoadedCheckpoint()
    for path, name in _files(directory):
        if name.position <= later_than:
            break
        try:
            return replace(found, path=path, content=load_checkpoint(path, library))
        except UsageError as error:
            found.bad.append(str(error))
    return found


def mark_best(path: Path) -> Path:
    """Give a checkpoint the name of the best one as well, and remove the best one before it."""
    name = CheckpointName.of(path)
    assert name is not None
    best = path.with_name(str(replace(name, kind=BEST)))
    try:
        os.link(path, best)
    except FileExistsError:
        pass
    except OSError:  # not every file system has hard links
        with replacing(best) as copy, open(path, "rb") as source:
            shutil.copyfileobj(source, copy)
    for other, named in _files(path.parent):
        if named.kind == BEST and other != best:
            other.unlink()
    return best


def remove_old(written: Path, keep: int) -> None:
    """Remove all but the last checkpoints, once a new one is on the disk.

    Checkpoints later than the new one are removed as well: they were damaged, and the run was
    resumed from one before them.
    """
    name = CheckpointName.of(written)
    assert name is not None
    files = _files(written.parent)
    before = [
        path for path, other in files if other.kind == CHECKPOINT and other.position < name.position
    ]
    kept = {written, *before[: keep - 1]}
    for path, other in files:
        if path not in kept and (other.kind == CHECKPOINT or other.position > name.position):
            path.unlink()


def _files(directory: Path) -> list[tuple[Path, CheckpointName]]:
    """Return all checkpoints, newest first; the best one follows one at the same position."""
    try:
        named = [(path, CheckpointName.of(path)) for path in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = [(path, name) for path, name in named if name is not None]
    return sorted(
        found, key=lambda item: (item[1].position, item[1].kind, str(item[0])), reverse=True
    )


# Training has priority: at this niceness, writing gets a tenth of a busy core.
_NICENESS = 10


class Checkpointable(Protocol):
    """State that can be saved."""

    tensor_library: TensorLibrary

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Note the current state; return what waits until it is copied and returns the copy."""


class Saver:
    """Writes checkpoints in the background, one after the other (rank 0 only).

    As a context manager it waits at the end for the checkpoint being written.
    """

    def __init__(self, directory: Path, keep: int) -> None:
        self._directory, self._keep = directory, keep
        self.newest: Path | None = None
        self._thread: threading.Thread | None = None
        self._problems: list[str] = []
        self._problem = ""
        self._fault: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._join()

    def save(
        self,
        epoch: int,
        samples: int,
        state: Checkpointable,
        about: Mapping[str, Any],
        best: bool = False,
    ) -> None:
        """Start writing a checkpoint of the current state.

        It first waits for an earlier one that is still being written, because it reuses its memory.
        """
        self.wait()
        content, read_state = copy.deepcopy(dict(about)), state.snapshot()

        def write() -> None:
            content.update(read_state())
            with suppress(OSError):  # a limit may forbid it
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
            path = write_checkpoint(self._directory, epoch, samples, content, state.tensor_library)
            self.newest = path
            report(f"{SAVED} {path}", os.environ)
            if best:
                mark_best(path)
            remove_old(path, self._keep)

        # Not a daemon: a rank that exits still completes the file.
        self._thread = threading.Thread(target=self._run, args=(write,), name="hvdtrain-saver")
        self._thread.start()

    def wait(self) -> None:
        """Wait for the checkpoint being written; problems() returns a failure."""
        self._join()
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def problems(self) -> list[str]:
        """Return what could not be written since the last call, one line each."""
        found, self._problems = self._problems, []
        return found

    def finish(self) -> Path | None:
        """Wait for the checkpoint being written, and return the newest one."""
        self.wait()
        if self._problem:
            raise UsageError(self._problem)
        return self.newest

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, write: Any) -> None:
        self._problem = ""
        try:
            write()
        except OSError as error:
            where = error.filename or self._directory
            state = (
                f"the newest is {self.newest.name}" if self.newest else "there is none before it"
            )
            self._problem = (
                f"a checkpoint of {where} could not be written ({error.strerror or error}): "
                f"{state}. Make room there, or name another directory with --out"
            )
            self._problems.append(self._problem)
        except BaseException as error:
            self._fault = error
