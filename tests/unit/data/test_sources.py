"""Each named data set, and each of one's own, is read as its files say; a damaged or missing file is named."""

from __future__ import annotations

import gzip
import io
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from numpy.typing import NDArray
from PIL import Image

from paceline.data import ArraySet, load
from paceline.errors import DataError, JobError
from paceline.spec import DataSpec


def arrays(name: str, **keys: Any) -> tuple[ArraySet, ArraySet]:
    train, test = load(DataSpec(name, **keys))
    assert isinstance(train, ArraySet) and isinstance(test, ArraySet)
    return train, test


def test_digits_are_the_published_scans_with_every_fifth_for_testing() -> None:
    train, test = arrays("digits")
    assert train.inputs.shape == (1438, 1, 28, 28) and test.inputs.shape == (359, 1, 28, 28)
    assert train.inputs.dtype == np.uint8 and train.num_classes == 10
    assert train.targets[:8].tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and test.targets[:3].tolist() == [4, 9, 4]
    counts = np.bincount(np.concatenate([train.targets, test.targets])).tolist()
    assert counts == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # Alpaydin and Kaynak 1998
    assert train.mean == pytest.approx([(train.inputs / 255).mean()], abs=1e-4)
    assert train.std == pytest.approx([(train.inputs / 255).std()], abs=1e-4)


def test_limits_take_the_first_samples_and_augmentation_is_for_training() -> None:
    whole, _ = arrays("digits")
    train, test = arrays("digits", train_limit=10, test_limit=4000, augment=("flip",))
    assert len(train) == 10 and len(test) == 359
    assert np.array_equal(train.inputs, whole.inputs[:10])
    assert train.augment is not None and train.augment.augment == ("flip",) and test.augment is None


# --- idx: http://yann.lecun.com/exdb/mnist/ ---

IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(directory: Path, *, zipped: bool) -> dict[str, NDArray[np.uint8]]:
    draw = np.random.default_rng(0)
    contents = {}
    for stem, count in (("train", 7), ("t10k", 3)):
        contents[f"{stem}-images-idx3-ubyte"] = draw.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        contents[f"{stem}-labels-idx1-ubyte"] = draw.integers(0, 10, count, dtype=np.uint8)
    for name, array in contents.items():
        raw = idx(array)
        (directory / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return contents


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize("zipped", [True, False])
def test_idx_files_are_read_zipped_or_not(tmp_path: Path, name: str, zipped: bool) -> None:
    contents = write_mnist(tmp_path, zipped=zipped)
    train, test = arrays(name, dir=str(tmp_path))
    assert np.array_equal(train.inputs[:, 0], contents[IMAGES])
    assert np.array_equal(train.targets, contents[LABELS])
    assert np.array_equal(test.targets, contents["t10k-labels-idx1-ubyte"])
    assert train.num_classes == 10


@pytest.mark.parametrize(
    ("file", "damage", "word"),
    [
        (IMAGES, lambda raw: b"\0\0\x08\x01" + raw[4:], "idx"),
        (IMAGES, lambda raw: b"\0\0\x0d\x03" + raw[4:], "idx"),
        (IMAGES, lambda _: b"", "idx"),
        (IMAGES, lambda raw: raw[:10], "idx"),
        (IMAGES, lambda raw: raw[:-1], "whole"),
        (IMAGES, lambda raw: raw + b"x", "whole"),
        (LABELS, lambda _: idx(np.zeros(6, np.uint8)), "6 labels for 7 images"),
        (LABELS, lambda raw: raw[:-1] + b"\x0a", "to 10"),
    ],
)
def test_a_damaged_idx_file_is_named_with_what_is_wrong(
    tmp_path: Path, file: str, damage: Callable[[bytes], bytes], word: str
) -> None:
    write_mnist(tmp_path, zipped=False)
    path = tmp_path / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=word) as caught:
        arrays("mnist", dir=str(tmp_path))
    assert file in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda _: b"no gzip", lambda raw: raw[:60] + b"?" * 9 + raw[69:]]
)
def test_a_damaged_gzip_file_is_named(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    write_mnist(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=f"{IMAGES}.gz"):
        arrays("mnist", dir=str(tmp_path))


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path, zipped=True)
    (tmp_path / f"{LABELS}.gz").unlink()
    with pytest.raises(DataError, match=LABELS):
        arrays("mnist", dir=str(tmp_path))
    with pytest.raises(DataError, match="parquet"):
        arrays("cifar10", dir=str(tmp_path))
    with pytest.raises(DataError, match=r"data\.dir.*nowhere"):
        arrays("mnist", dir=str(tmp_path / "nowhere"))


# --- parquet ---


def png(pixels: NDArray[np.uint8]) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_parquet(path: Path, images: list[bytes], labels: list[int], column: str = "label") -> None:
    cells = [{"bytes": image, "path": None} for image in images]
    pyarrow.parquet.write_table(pyarrow.table({"img": cells, column: labels}), path, row_group_size=2)


@pytest.mark.parametrize(("name", "column"), [("cifar10", "label"), ("cifar100", "fine_label")])
def test_parquet_files_are_read_in_the_order_of_their_names(tmp_path: Path, name: str, column: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    images = [png(image) for image in pixels]
    write_parquet(tmp_path / "train-00001-of-00002.parquet", images[3:4], [4], column)
    write_parquet(tmp_path / "train-00000-of-00002.parquet", images[:3], [1, 2, 3], column)
    write_parquet(tmp_path / "test-00000-of-00001.parquet", images[4:], [5], column)
    train, test = arrays(name, dir=str(tmp_path))
    assert np.array_equal(train.inputs, pixels[:4].transpose(0, 3, 1, 2)) and train.targets.tolist() == [1, 2, 3, 4]
    assert np.array_equal(test.inputs[0], pixels[4].transpose(2, 0, 1)) and test.targets.tolist() == [5]


BLACK = np.zeros((32, 32, 3), np.uint8)


def test_images_are_decoded_once_until_their_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", [png(BLACK), png(BLACK + 7)], [0, 1])
    first, _ = arrays("cifar10", dir=str(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(Image, "open", None)  # nothing is decoded any more
        again, _ = arrays("cifar10", dir=str(tmp_path))
    assert np.array_equal(first.inputs, again.inputs) and again.targets.tolist() == [0, 1]
    for kept in tmp_path.glob(".*.npy"):
        kept.write_bytes(kept.read_bytes()[:50])
    assert np.array_equal(arrays("cifar10", dir=str(tmp_path))[0].inputs, first.inputs)
    write_parquet(tmp_path / "train.parquet", [png(BLACK + 9)], [2])
    changed, _ = arrays("cifar10", dir=str(tmp_path))
    assert np.array_equal(changed.inputs, np.full((1, 3, 32, 32), 9)) and changed.targets.tolist() == [2]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-10]), ["parquet"]),
        (lambda path: path.write_bytes(b""), ["parquet"]),
        (lambda path: write_parquet(path, [png(BLACK), png(BLACK)[:60]], [0, 1]), ["image", "row 1"]),
        (lambda path: write_parquet(path, [png(np.zeros((8, 9, 3), np.uint8))], [0]), ["32 x 32", "row 0"]),
        (lambda path: write_parquet(path, [png(BLACK)], [0], "klass"), ["label", "img, klass"]),
        (lambda path: write_parquet(path, [png(BLACK)], [12]), ["to 12"]),
    ],
)
def test_a_damaged_parquet_file_is_named_with_what_is_wrong(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    for name in ("train", "test"):
        write_parquet(tmp_path / f"{name}.parquet", [png(BLACK)], [0])
    damage(tmp_path / "train.parquet")
    with pytest.raises(DataError) as caught:
        arrays("cifar10", dir=str(tmp_path))
    assert all(word in str(caught.value) for word in ["train.parquet", *words])


def test_without_a_folder_a_published_set_comes_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), dtype=np.uint8)
    cells = [{"bytes": png(one), "path": None} for one in pixels]

    def load_dataset(repository: str, split: str) -> datasets.Dataset:
        assert repository == "ylecun/mnist"
        rows = datasets.Dataset.from_dict({"image": cells, "label": [3, 1, 2]})
        return rows.cast_column("image", datasets.Image()).select(range(3 if split == "train" else 2))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    train, test = arrays("mnist", train_limit=2)
    assert np.array_equal(train.inputs[:, 0], pixels[:2]) and train.targets.tolist() == [3, 1]
    assert np.array_equal(test.inputs[:, 0], pixels[:2]) and test.num_classes == 10


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(*_: object, **__: object) -> datasets.Dataset:
        raise ConnectionError("Couldn't reach 'ylecun/mnist' on the Hub (timed out)")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(DataError, match=r"mnist .*Hugging Face hub: Couldn't reach .*data\.dir"):
        arrays("mnist")


# --- a folder of images ---


def write_images(directory: Path, counts: dict[str, int], size: tuple[int, int] = (20, 12)) -> None:
    for shade, (name, count) in enumerate(counts.items()):
        (directory / name).mkdir(parents=True)
        for number in range(count):
            Image.new("RGB", size, (shade * 100, number, 0)).save(directory / name / f"{number:03}.png")


def folder(directory: Path, **keys: Any) -> tuple[Any, Any]:
    train, test = load(DataSpec("folder", dir=str(directory), **keys))
    return train, test


@pytest.mark.parametrize("name", ["val", "test"])
def test_a_folder_with_two_splits_is_read_by_class(tmp_path: Path, name: str) -> None:
    write_images(tmp_path / "train", {"cat": 3, "dog": 2})
    write_images(tmp_path / name, {"cat": 1, "dog": 1})
    train, test = folder(tmp_path, options={"image_size": 16}, train_limit=4)
    assert [train[number][1] for number in range(len(train))] == [0, 0, 0, 1]
    assert len(test) == 2 and train.classes == ("cat", "dog")
    image, _ = train[3]
    assert image.shape == (3, 16, 16)
    assert image[0].mean().item() == pytest.approx((100 / 255 - 0.485) / 0.229, abs=1e-5)  # ImageNet's


def test_a_folder_without_splits_keeps_each_file_in_its_split_when_others_go(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 60, "dog": 60}, size=(2, 2))
    train, test = folder(tmp_path)
    assert 3 <= len(test) <= 25 and len(train) + len(test) == 120
    assert not set(train.files) & set(test.files)
    (tmp_path / "cat" / "000.png").unlink()
    assert set(folder(tmp_path)[1].files) == set(test.files) - {tmp_path / "cat" / "000.png"}


def test_a_mistake_in_a_folder_is_named_one_after_the_other(tmp_path: Path) -> None:
    damaged = tmp_path / "val" / "dog" / "x.jpg"
    steps: list[tuple[str, Callable[[], Any]]] = [
        ("no subfolders", lambda: write_images(tmp_path / "train", {"cat": 1, "dog": 1})),
        ("val/", lambda: write_images(tmp_path / "val", {"cat": 1})),
        ("dog", lambda: (tmp_path / "val" / "dog").mkdir()),
        ("no images", lambda: damaged.write_bytes(b"no image")),
    ]
    for word, repair in steps:
        with pytest.raises(DataError, match=word):
            folder(tmp_path)
        repair()
    with pytest.raises(DataError, match=r"x\.jpg"):
        folder(tmp_path)[1][1]
    with pytest.raises(JobError, match="image_size"):
        folder(tmp_path, options={"image_sice": 3})
    with pytest.raises(DataError, match=r"data\.dir"):
        load(DataSpec("folder"))


# --- text ---


def test_text_is_bytes_whose_targets_are_the_next_ones_and_the_last_tenth_is_for_testing(tmp_path: Path) -> None:
    raw = bytes(range(200)) * 5
    (tmp_path / "book.txt").write_bytes(raw)
    train, test = arrays("text", dir=str(tmp_path), options={"file": "book.txt", "context": 10})
    assert train.inputs.shape == (89, 10) and test.inputs.shape == (9, 10) and train.num_classes == 256
    assert train.inputs.tobytes() == raw[:890] and train.targets.tobytes() == raw[1:891]
    assert test.inputs[0].tobytes() == raw[900:910]


def test_a_text_that_is_missing_or_too_short_for_both_splits_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    for size, is_enough in ((1280, False), (1281, True)):
        short.write_bytes(b"x" * size)
        if is_enough:
            assert len(arrays("text", options={"file": str(short)})[1]) == 1
        else:
            with pytest.raises(DataError, match=r"1280.*1281"):
                arrays("text", options={"file": str(short)})
    with pytest.raises(DataError, match=r"none\.txt"):
        arrays("text", options={"file": str(tmp_path / "none.txt")})
    with pytest.raises(JobError, match=r"data\.options\.file"):
        arrays("text")
    with pytest.raises(DataError, match=r"data\.augment"):
        arrays("text", options={"file": str(short)}, augment=("flip",))


# --- names, options, and sets of one's own ---

MODULE = """
import numpy as np
from paceline.data import ArraySet

def by_split(split, count=10):
    return [(split, number) for number in range(count)]

def both(count=10):
    return list(range(count)), list(range(3))

def images():
    one = ArraySet(np.zeros((4, 1, 2, 2), np.uint8), np.zeros(4, np.int64), 2, (0.5,), (0.5,))
    return one, one

def stream():
    return iter([]), iter([])

def single():
    return {}

def empty():
    return [], []

number = 3
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_module.py").write_text(MODULE)
    (tmp_path / "own_broken_module.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_data_module"


def test_a_set_of_ones_own_is_built_by_its_import_path(own: str) -> None:
    train, test = load(DataSpec(f"{own}:by_split", options={"count": 5}, train_limit=2))
    assert len(train) == 2 and train[1] == ("train", 1) and test[4] == ("test", 4)
    train, test = load(DataSpec(f"{own}:both", test_limit=2))
    assert len(train) == 10 and len(test) == 2
    images, _ = arrays(f"{own}:images", augment=("crop",))
    assert images.augment is not None


@pytest.mark.parametrize(
    ("name", "keys", "error", "words"),
    [
        ("cifar-10", {}, DataError, ["cifar-10", "did you mean 'cifar10'"]),
        ("xyzzy", {}, DataError, ["xyzzy", "digits", "package.module:build"]),
        ("digits", {"options": {"size": 3}}, JobError, ["data.options.size"]),
        ("folder", {"options": {"image_size": 0}}, JobError, ["image_size"]),
        ("own_data_module:nothing", {}, DataError, ["nothing"]),
        ("own_data_module:number", {}, DataError, ["number"]),
        ("own_data_module:stream", {}, DataError, ["length"]),
        ("own_data_module:single", {}, DataError, ["dict"]),
        ("own_data_module:empty", {}, DataError, ["no samples"]),
        ("own_data_module:both", {"augment": ("flip",)}, DataError, ["data.augment"]),
        ("no_such_module_at_all:build", {}, DataError, ["no_such_module_at_all"]),
        (":build", {}, DataError, ["import path"]),
    ],
)
def test_a_mistake_in_a_name_or_an_option_is_named(
    own: str, name: str, keys: dict[str, Any], error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        load(DataSpec(name, **keys))
    assert all(word in str(caught.value) for word in words)


def test_a_bug_in_ones_own_module_keeps_its_traceback(own: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load(DataSpec("own_broken_module:build"))
    with pytest.raises(TypeError):
        load(DataSpec(f"{own}:both", options={"cuont": 1}))


@pytest.mark.parametrize(
    ("module", "name", "extra"), [("pyarrow.parquet", "cifar10", "parquet"), ("PIL.Image", "folder", "images")]
)
def test_an_extra_that_is_not_installed_is_named_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, name: str, extra: str
) -> None:
    for split in ("train", "test"):
        write_parquet(tmp_path / f"{split}.parquet", [png(BLACK)], [0])
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(DataError, match=rf"pip install 'paceline\[{extra}\]'"):
        load(DataSpec(name, dir=str(tmp_path)))
