"""Image files: in folders and in map files, how they are cut, and what is said of bad ones."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from data_files import write_images
from PIL import Image

from hvdtrain.data import center_crop, random_crop, random_flip, sample_generator
from hvdtrain.data.image_folder import load_image_folders
from hvdtrain.data.images import read_image
from hvdtrain.data.map_file import load_map_files, read_map_file
from hvdtrain.errors import UsageError


def red(image: np.ndarray) -> float:
    return float((image[0].mean() * 0.229 + 0.485) * 255)


def test_folders(tmp_path: Path) -> None:
    names = ["train/dog/b.JPG", "train/cat/a.png", "train/cat/c.png", "val/dog/x.png"]
    write_images([tmp_path / name for name in names])
    (tmp_path / "train/cat/notes.txt").write_text("no image")
    (tmp_path / "train/cat/._a.png").write_text("no image either")
    (tmp_path / "train/.cache").mkdir()
    train, test = load_image_folders(tmp_path, size=16, crop=8)
    assert list(train.classes) == list(test.classes) == ["cat", "dog"]
    assert [str(path.relative_to(tmp_path)) for path in train.paths] == [
        *("train/cat/a.png", "train/cat/c.png", "train/dog/b.JPG")
    ]
    assert ([train[i][1] for i in range(len(train))], test[0][1]) == ([0, 0, 1], 1)
    image, _ = train[1]
    assert image.shape == (3, 16, 16)
    assert image.dtype == np.float32
    assert red(image) == pytest.approx(2, abs=0.01)
    assert test[0][0].shape == (3, 8, 8)
    write_images([tmp_path / "test/cat/t.png"])  # taken before val
    assert [path.name for path in load_image_folders(tmp_path, 16, 8)[1].paths] == ["t.png"]


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ([], "there is no folder train in {}; expected train/CLASS/"),
        (["train/a/x.png"], "there is no folder test or val in {}; expected train/CLASS/"),
        (["train/x.png", "test/a/x.png"], "{}/train has no folders: expected one for each"),
        (["train/a/x.png", "test/b/x.png"], "{}/test/b: there is no class 'b' in {}/train"),
        (["train/a/x.txt", "test/a/x.png"], "{}/train has no images: expected train/CLASS/"),
    ],
)
def test_bad_folders(tmp_path: Path, names: list[str], fault: str) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    with pytest.raises(UsageError) as error:
        load_image_folders(tmp_path, 16, 8)
    assert fault.format(tmp_path, tmp_path) in str(error.value)
    with pytest.raises(UsageError, match="imagefolder needs --data-dir DIR, with train/CLASS/"):
        load_image_folders(None, 16, 8)


def test_map_files(tmp_path: Path) -> None:
    images = tmp_path / "images"
    write_images([images / f"{number} x.png" for number in range(3)])
    (tmp_path / "train.txt").write_text(
        f"images/0 x.png\t4\r\n\nimages/2 x.png\t0\n{images}/1 x.png\t1"
    )
    (tmp_path / "test.txt").write_text("images/1 x.png\t4\n")
    train, test = load_map_files(tmp_path, size=16, crop=8)
    assert list(train.labels) == [4, 0, 1]
    assert list(train.classes) == list("01234")
    assert [red(train[i][0]) for i in range(3)] == pytest.approx([0, 2, 1], abs=0.01)
    assert (test[0][0].shape, test[0][1]) == ((3, 8, 8), 4)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a.png\t1\nb.png 2\n", "line 2: expected PATH, a tab and LABEL, got 'b.png 2'"),
        ("\n\n\t2", "line 3: expected PATH, a tab and LABEL"),
        ("a.png\tcat", "line 1: the label must be an integer from 0, got 'cat'"),
        ("a.png\t-1", "line 1: the label must be an integer from 0, got '-1'"),
        ("a.png\t1\t2", r"line 1: the label must be an integer from 0, got '1\\t2'"),
        ("a.png\t3", "line 1: label 3 is not one of the 3 training classes"),
        ("\n", "map.txt lists no images"),
        ("\udcff", "map.txt is not text in UTF-8: byte 0 is invalid"),
    ],
)
def test_bad_map_files(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "map.txt"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=f"{tmp_path}/map.txt.*{fault}|{fault}"):
        read_map_file(path, 3)
    with pytest.raises(UsageError, match=r"train.txt, test.txt not found in .*, a tab and its"):
        load_map_files(tmp_path, 16, 8)


def test_the_middle_of_an_image_is_kept(tmp_path: Path) -> None:
    pixels = np.zeros((30, 90, 3), np.uint8)
    pixels[:, 30:60] = 255  # the middle third of a wide image
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    image = read_image(tmp_path / "wide.png", 30)
    assert red(image) == pytest.approx(255, abs=0.01)
    assert red(read_image(tmp_path / "wide.png", 10, crop=4)) == pytest.approx(255, abs=0.01)
    Image.fromarray(pixels[..., 0]).save(tmp_path / "gray.png")
    assert np.array_equal(read_image(tmp_path / "gray.png", 30), image)


def test_bad_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_images([tmp_path / "a.png"], (400, 300))
    whole = (tmp_path / "a.png").read_bytes()
    for name, content in (("cut.png", whole[:200]), ("text.png", b"text"), ("empty.png", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match=f"cannot read the image {tmp_path}/{name}: "):
            read_image(tmp_path / name, 8)
    with pytest.raises(UsageError, match=f"{tmp_path}/gone.png: No such file or directory"):
        read_image(tmp_path / "gone.png", 8)
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(UsageError, match="pip install pillow"):
        read_image(tmp_path / "a.png", 8)


def test_crops_and_flips() -> None:
    image = np.arange(2 * 6 * 8).reshape(2, 6, 8)
    assert np.array_equal(center_crop(image, 4), image[:, 1:5, 2:6])
    places, mirrored = set(), 0
    for index in range(200):
        generator = sample_generator(0, 0, index)
        crop = random_crop(image, 4, generator)
        top, left = divmod(int(crop[0, 0, 0]), 8)
        places.add((top, left))
        assert np.array_equal(crop, image[:, top : top + 4, left : left + 4])
        flipped = random_flip(image, generator)
        if not np.array_equal(flipped, image):
            mirrored += 1
            assert np.array_equal(flipped, image[..., ::-1])
    assert places == {(top, left) for top in range(3) for left in range(5)}
    assert 60 < mirrored < 140
    padded = random_crop(image, 10, sample_generator(0, 0, 0), padding=2)
    assert padded.shape == (2, 10, 10)
    assert set(padded[:, :2].ravel()) == {0}
