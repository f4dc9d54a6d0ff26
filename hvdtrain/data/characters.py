"""A text file, character by character, in windows of one length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hvdtrain.data.files import data_folder, missing_files, read_text
from hvdtrain.errors import UsageError

_LAYOUT = "one file that ends in .txt, in UTF-8"
_TEST_FRACTION = 0.1

Tokens = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Windows:
    """A map-style data set: [index] returns (characters, the character that follows each)."""

    tokens: Tokens  # the numbers of the characters of the text, [n]
    context: int

    def __len__(self) -> int:
        """Return the number of windows; a remainder that does not fill one is omitted."""
        return max(0, (len(self.tokens) - 1) // self.context)

    def __getitem__(self, index: int) -> tuple[Tokens, Tokens]:
        start, stop = index * self.context, (index + 1) * self.context
        return self.tokens[start:stop], self.tokens[start + 1 : stop + 1]


@dataclass(frozen=True)
class Characters:
    """A text in windows."""

    vocabulary: Sequence[str]
    train: Windows
    test: Windows


def load_text(data_dir: Path | None, context: int, file: str = "") -> Characters:
    """Load a text."""
    if context < 1:
        raise UsageError(f"context must be at least 1, got {context}")
    path = _path(data_dir, file)
    text = read_text(path)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    vocabulary, numbers = np.unique(codes, return_inverse=True)
    tokens = numbers.astype(np.int64)
    split = len(tokens) - int(len(tokens) * _TEST_FRACTION)
    train, test = Windows(tokens[:split], context), Windows(tokens[split:], context)
    if not (len(train) and len(test)):
        raise UsageError(
            f"{path} has {len(tokens)} characters: too few for windows of {context}, of which a "
            "tenth of the text, for testing, must hold one"
        )
    return Characters([chr(code) for code in vocabulary], train, test)


def _path(data_dir: Path | None, file: str) -> Path:
    if data_dir is not None and data_dir.is_file() and not file:
        return data_dir
    folder = data_folder(data_dir, "text", _LAYOUT)
    if file:
        if not (folder / file).is_file():
            raise missing_files("text", folder, [file], _LAYOUT)
        return folder / file
    found = sorted(folder.glob("*.txt"))
    if not found:
        raise missing_files("text", folder, ["*.txt"], _LAYOUT)
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise UsageError(f"text: {folder} has {names}; name one of them as data_dir, or as file")
    return found[0]
