"""Image files listed with their labels, one a line, as CNTK's readers take them."""

from __future__ import annotations

from pathlib import Path

from hvdtrain.data.files import data_folder, missing_files, read_text
from hvdtrain.data.images import ImageFiles
from hvdtrain.errors import UsageError

__all__ = ["load_map_files", "read_map_file"]

_LAYOUT = "train.txt and test.txt, each line the path of an image, a TAB and its label from 0"


def load_map_files(data_dir: Path | None, size: int, crop: int) -> tuple[ImageFiles, ImageFiles]:
    """Find the images to train on, uncropped, and those to test on, cropped to their middle.

    There are as many classes as the largest label to train on says. Images are read when they are
    needed.

    Args:
        data_dir: holds train.txt and test.txt.
        size: pixels of the shorter side after resizing; see ImageFiles.
        crop: pixels of a test image.

    Raises:
        UsageError: a map file is not there, or a line of it is wrong.
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
        path: of the map file; the paths in it are relative to its folder.
        classes: labels must be less; None: any from 0.

    Raises:
        UsageError: it cannot be read, a line is wrong, or there is none.
    """
    paths: list[Path] = []
    labels: list[int] = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if line.strip():
            name, label = _parsed(line, f"{path}, line {number}", classes)
            paths.append(path.parent / name)
            labels.append(label)
    if not paths:
        raise UsageError(f"{path} lists no images; expected on each line: PATH, a TAB, LABEL")
    return paths, labels


def _parsed(line: str, place: str, classes: int | None) -> tuple[str, int]:
    name, tab, text = line.partition("\t")
    if not (tab and name.strip()):
        raise UsageError(f"{place}: expected PATH, a TAB and LABEL, got {line.rstrip()!r}")
    label = text.strip()
    if not (label.isascii() and label.isdigit()):
        raise UsageError(f"{place}: the label must be a whole number from 0, got {label!r}")
    if classes is not None and int(label) >= classes:
        raise UsageError(f"{place}: label {label} is none of the {classes} classes to train on")
    return name.strip(), int(label)
