"""Data in files: all ways in which they may be named and packed, and be wrong."""

import gzip
import pickle
import struct
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from data_files import idx, python_batch, write_cifar10, write_images, write_mnist
from PIL import Image
from refusing import refused

from hvdtrain.data import center_crop, random_crop, random_flip, sample_generator
from hvdtrain.data.cifar10 import load_cifar10
from hvdtrain.data.idx import load_mnist, read_idx, read_mnist_images
from hvdtrain.data.image_folder import load_image_folders
from hvdtrain.data.images import read_image
from hvdtrain.data.map_file import load_map_files, read_map_file
from hvdtrain.errors import UsageError


@pytest.mark.parametrize("mark", "-.")
@pytest.mark.parametrize("packed", [False, True])
def test_names_and_values(tmp_path: Path, mark: str, packed: bool) -> None:
    images, labels = write_mnist(tmp_path, train=6, test=3, mark=mark, packed=packed)
    data = load_mnist(tmp_path)
    assert data.train.inputs.shape == (6, 1, 28, 28)
    assert data.train.inputs.dtype == np.float32
    assert data.test.labels.tolist() == labels[6:].tolist()
    assert np.allclose(data.train.inputs, (images[:6, None] / 255 - 0.1307) / 0.3081, atol=1e-6)
    (file,) = tmp_path.glob("t10k-images*")
    assert np.array_equal(read_mnist_images(file), data.test.inputs)


def test_where_files_are_expected(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/x; expected a folder"):
        load_mnist(tmp_path / "x")
    write_mnist(tmp_path, train=2, test=2)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    (tmp_path / IMAGES_FILE).unlink()
    missing = "train-images-idx3-ubyte, t10k-labels-idx1-ubyte not found in"
    with pytest.raises(UsageError, match=f"{missing} {tmp_path}; .*nothing is downloaded$"):
        load_mnist(tmp_path)


IMAGES_FILE, LABELS_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
IMAGES = np.zeros((2, 28, 28), np.uint8)
ROW, LABEL = np.zeros((1, 3072), np.uint8), np.array([3], np.uint8)
BATCH = python_batch(ROW, LABEL)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        (IMAGES_FILE, idx(IMAGES)[:-5], "is truncated: got 1579 bytes, expected 1584"),
        (IMAGES_FILE, idx(IMAGES) + b"x", "is longer than its header says: got 1585"),
        (IMAGES_FILE, idx(IMAGES)[:9], "ends after 9 bytes, in its header"),
        (IMAGES_FILE, b"<html>", "begins with 3c 68 74 6d, not 00 00 08 03"),
        (
            IMAGES_FILE,
            idx(IMAGES)[:4] + struct.pack(">3I", *[2**32 - 1] * 3),
            "is truncated: got 16 bytes, expected 79228162458924105385300197391",
        ),
        (IMAGES_FILE, idx(IMAGES[:, 1:]), "has images of 27 x 28 pixels"),
        (LABELS_FILE, idx(np.zeros(3, np.uint8)), "has 2 images, but .* 3 labels"),
        ("t10k-labels-idx1-ubyte", idx(np.array([9, 10], np.uint8)), "label 10 of image 1 is not"),
        ("data_batch_2.bin", bytes(3072), "its 3072 bytes are not a multiple of 3073"),
        ("data_batch_2.bin", b"", "has no images"),
        ("data_batch_2.bin", bytes(3073) + b"\x0a" + bytes(3072), "label 10 of image 1"),
        ("test_batch", BATCH[:-100], "truncated"),
        ("test_batch", b"", "Ran out of input"),
        ("test_batch", b"no pickle", "UnpicklingError|invalid"),
        ("test_batch", pickle.dumps({}), "KeyError"),
        ("test_batch", BATCH.replace(b"u1", b"f4"), "not rows of unsigned bytes"),
        ("test_batch", python_batch(ROW[:, :5], LABEL), "cannot reshape"),
        ("test_batch", BATCH.replace(b"numpy\nndarray", b"numpy\nmemmap"), "it names numpy.memmap"),
    ],
)
def test_damaged_files(tmp_path: Path, name: str, content: bytes, fault: str) -> None:
    if name.endswith("ubyte"):
        load = load_mnist
        write_mnist(tmp_path, train=2, test=2)
    else:
        load = load_cifar10
        write_cifar10(tmp_path, 1, python=name == "test_batch")
    (tmp_path / name).write_bytes(content)
    with refused(str(tmp_path / name), match=fault):
        load(tmp_path)


@pytest.mark.parametrize(
    ("cut", "fault"), [(slice(0, 60), "damaged"), (slice(0, 2), "damaged"), (slice(4, 60), "not a")]
)
def test_damaged_gzip(tmp_path: Path, cut: slice, fault: str) -> None:
    noise: npt.NDArray[np.uint8] = np.random.default_rng(0).integers(256, size=99, dtype=np.uint8)
    path = tmp_path / "labels.gz"
    path.write_bytes(gzip.compress(idx(noise))[cut])
    with pytest.raises(UsageError, match=f"{path} is .*{fault}"):
        read_idx(path, 1)
    with pytest.raises(UsageError, match=f"cannot read {tmp_path}: Is a directory"):
        read_idx(tmp_path, 1)


MEAN = np.array([0.485, 0.456, 0.406])[:, None, None]
DEVIATION = np.array([0.229, 0.224, 0.225])[:, None, None]


@pytest.mark.parametrize(
    ("inner", "python"),
    [(".", False), (".", True), ("cifar-10-batches-bin", False), ("cifar-10-batches-py", True)],
)
def test_both_versions(tmp_path: Path, inner: str, python: bool) -> None:
    (tmp_path / inner).mkdir(exist_ok=True)
    images, labels = write_cifar10(tmp_path / inner, 4, python)
    data = load_cifar10(tmp_path)
    expected = (images.reshape(-1, 3, 32, 32) / 255 - MEAN) / DEVIATION
    assert np.allclose(data.train.inputs, expected[:20], atol=1e-5)
    assert np.allclose(data.test.inputs, expected[20:], atol=1e-5)
    assert data.train.inputs.dtype == np.float32
    assert [*data.train.labels, *data.test.labels] == labels.tolist()


def test_missing_batches_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"data_batch_1.bin, data_batch_1 not found .*binary"):
        load_cifar10(tmp_path)
    write_cifar10(tmp_path, 1, python=False)
    for number in (3, 4):
        (tmp_path / f"data_batch_{number}.bin").unlink()
    with pytest.raises(UsageError, match=f"data_batch_3.bin, data_batch_4.bin .* {tmp_path};"):
        load_cifar10(tmp_path)


class Evil:
    """Touches a file when it is unpickled in the usual way."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object]]:
        return Path.touch, (self.path,)


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    write_cifar10(tmp_path, 1, python=True)
    evil, mark = pickle.dumps(Evil(tmp_path / "touched"), protocol=2), tmp_path / "touched"
    (tmp_path / "data_batch_1").write_bytes(evil)
    with pytest.raises(UsageError, match=r"data_batch_1 is damaged .* which no such batch needs"):
        load_cifar10(tmp_path)
    assert not mark.exists()
    pickle.loads(evil)  # else it would prove nothing
    assert mark.exists()


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
    with refused(fault.format(tmp_path, tmp_path)):
        load_image_folders(tmp_path, 16, 8)


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
        ("a.png\tcat", "line 1: the label must be an integer from 0, got 'cat'"),
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
    (tmp_path / "cut.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    with pytest.raises(UsageError, match=f"cannot read the image {tmp_path}/cut.png: "):
        read_image(tmp_path / "cut.png", 8)
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
