"""Image files listed with their labels, one per line, in the format of CNTK's readers."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.data.files import data_folder, missing_files, read_text
from hvdtrain.data.images import ImageFiles
from hvdtrain.errors import UsageError

__all__ = ["load_map_files", "read_map_file"]

_LAYOUT = "train.txt and test.txt, each line the path of an image, a tab and its label from 0"


def load_map_files(data_dir: Path | None, size: int, crop: int) -> tuple[ImageFiles, ImageFiles]:
    """Find the training images, uncropped, and the test images, cropped to their centers.

    The number of classes is the largest training label plus one. Images are read when they are
    needed.

    Args:
        data_dir: folder with train.txt and test.txt.
        size: pixels of the shorter side after resizing; see ImageFiles.
        crop: pixels of a test image.

    Raises:
        UsageError: a map file is missing, or a line of it is invalid.
    """
    folder = data_folder(data_dir, "mapfile", _LAYOUT)
    missing = [name for name in ("train.txt", "test.txt") if not (folder / name).is_file()]
    if missing:
        raise missing_files("mapfile", folder, missing, _LAYOUT)
    paths, labels = read_map_file(folder / "train.txt")
    classes = [str(label) for label in range(max(labels) + 1)]
    test_paths, test_labels = read_map_file(folder / "test.txt", len(classes))
    train = ImageFiles(paths, labels, classes, size)
    return train, ImageFiles(test_paths, test_labels, classes, size, crop)


def read_map_file(path: Path, classes: int | None = None) -> tuple[list[Path], list[int]]:
    """Return the paths and the labels in a map file; empty lines are skipped.

    Args:
        path: map file; the paths in it are relative to its folder.
        classes: number that labels must be less than; None: any label from 0.

    Raises:
        UsageError: it cannot be read, a line is invalid, or there is none.
    """
    paths: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            name, label = _parsed(line, f"{path}, line {number}", classes)
            paths.append(path.parent / name)
            labels.append(label)
    if not paths:
        raise UsageError(f"{path} lists no images; expected on each line: PATH, a tab, LABEL")
    return paths, labels


def _parsed(line: str, where: str, classes: int | None) -> tuple[str, int]:
    name, tab, text = line.partition("\t")
    if not (tab and name.strip()):
        raise UsageError(f"{where}: expected PATH, a tab and LABEL, got {line.rstrip()!r}")
    label = text.strip()
    if not (label.isascii() and label.isdigit()):
        raise UsageError(f"{where}: the label must be an integer from 0, got {label!r}")
    if classes is not None and int(label) >= classes:
        raise UsageError(f"{where}: label {label} is not one of the {classes} training classes")
    return name.strip(), int(label)
