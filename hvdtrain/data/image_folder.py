"""Images in one folder per class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hvdtrain.data.files import data_folder
from hvdtrain.data.images import ENDINGS, ImageFiles
from hvdtrain.errors import UsageError

_LAYOUT = (
    f"train/CLASS/*{ENDINGS[0]} and test/CLASS/*{ENDINGS[0]} (or val/), one folder for each class; "
    f"images may end in {', '.join(ENDINGS)}"
)


def load_image_folders(
    data_dir: Path | None, size: int, crop: int
) -> tuple[ImageFiles, ImageFiles]:
    """Find the training images, uncropped, and the test images, cropped to their centers.

    Classes are numbered in the order of their names. Files are read when they are needed.

    Args:
        data_dir: folder with train/ and test/ or val/, each with one folder per class.
        size: pixels of the shorter side after resizing; see ImageFiles.
        crop: pixels of a test image.

    Raises:
        UsageError: a folder is missing, is empty, or is of an unknown class.
    """
    folder = data_folder(data_dir, "imagefolder", _LAYOUT)
    train_folder, test_folder = _part(folder, "train"), _part(folder, "test", "val")
    classes = _classes(train_folder)
    unknown = sorted(set(_classes(test_folder)) - set(classes))
    if unknown:
        raise UsageError(
            f"{test_folder / unknown[0]}: there is no class {unknown[0]!r} in {train_folder}"
        )
    train = _images(train_folder, classes, size, None)
    return train, _images(test_folder, classes, size, crop)


def _part(folder: Path, *names: str) -> Path:
    for name in names:
        if (folder / name).is_dir():
            return folder / name
    raise UsageError(
        f"imagefolder: there is no folder {' or '.join(names)} in {folder}; expected "
        f"{_LAYOUT}; nothing is downloaded"
    )


def _classes(folder: Path) -> list[str]:
    inside = (inner for inner in folder.iterdir() if inner.is_dir())
    classes = sorted(inner.name for inner in inside if not _hidden(inner))
    if not classes:
        raise UsageError(f"{folder} has no folders: expected one for each class")
    return classes


def _images(folder: Path, classes: Sequence[str], size: int, crop: int | None) -> ImageFiles:
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        # A class may have nothing to test on.
        inside = (folder / name).iterdir() if (folder / name).is_dir() else ()
        images = (path for path in inside if path.suffix.lower() in ENDINGS)
        of_class = sorted(path for path in images if not _hidden(path))
        paths += of_class
        labels += [label] * len(of_class)
    if not paths:
        raise UsageError(f"{folder} has no images: expected {_LAYOUT}")
    return ImageFiles(paths, labels, classes, size, crop)


def _hidden(path: Path) -> bool:
    """Return whether a file was left behind by a file manager or a notebook."""
    return path.name.startswith(".")
