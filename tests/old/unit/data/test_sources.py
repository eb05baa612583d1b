"""Every data source on small files of its format, whole and damaged; and on real sets where there are any."""

from __future__ import annotations

import gzip
import io
import os
import pickle
import random
import struct
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import paceline.data
from paceline.data import ArraySet, FolderImages, load
from paceline.errors import DataError, JobError
from paceline.spec import DataSpec

REAL_DATA = os.environ.get("PACELINE_TEST_DATA")
real_data = pytest.mark.skipif(not REAL_DATA, reason="PACELINE_TEST_DATA names no directory of real data sets")


@pytest.fixture(autouse=True)
def data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    directory = tmp_path / "files"
    directory.mkdir()
    return directory


def arrays(name: str, **keys: Any) -> tuple[ArraySet, ArraySet]:
    train, test = load(DataSpec(name, **keys))
    assert isinstance(train, ArraySet) and isinstance(test, ArraySet)
    return train, test


# --- digits ---


def test_digits() -> None:
    train, test = arrays("digits")
    assert train.inputs.shape == (1438, 1, 28, 28) and test.inputs.shape == (359, 1, 28, 28)
    assert train.inputs.dtype == np.uint8 and train.targets.dtype == np.int64
    assert train.targets[:8].tolist() == [0, 1, 2, 3, 5, 6, 7, 8] and test.targets[:3].tolist() == [4, 9, 4]
    image = train.inputs[0, 0]
    assert image.max() <= 255 and not image[:2].any() and not image[:, -2:].any()
    assert (image[2:26:3, 2:26:3] == image[4:26:3, 4:26:3]).all()
    pixels = train.inputs / 255
    assert train.mean == pytest.approx([pixels.mean()], abs=1e-4)
    assert train.std == pytest.approx([pixels.std()], abs=1e-4)


def test_limits_and_augmentation() -> None:
    train, test = arrays("digits", train_limit=10, test_limit=4000, augment=("flip",))
    assert len(train) == 10 and len(test) == 359
    assert train.augment is not None and train.augment.flip and test.augment is None


# --- idx ---


def idx(array: NDArray[np.uint8]) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(directory: Path, *, zipped: bool = True, dotted: bool = False) -> dict[str, NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    contents = {}
    for stem, count in (("train", 7), ("t10k", 3)):
        contents[f"{stem}-images-idx3-ubyte"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        contents[f"{stem}-labels-idx1-ubyte"] = rng.integers(0, 10, count, dtype=np.uint8)
    for name, array in contents.items():
        raw = idx(array)
        name = name.replace("-idx", ".idx") if dotted else name
        (directory / (name + ".gz" * zipped)).write_bytes(gzip.compress(raw) if zipped else raw)
    return contents


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
@pytest.mark.parametrize(("zipped", "dotted"), [(True, False), (False, False), (False, True)])
def test_mnist(files: Path, name: str, zipped: bool, dotted: bool) -> None:
    contents = write_mnist(files, zipped=zipped, dotted=dotted)
    train, test = arrays(name, dir=str(files))
    assert (train.inputs[:, 0] == contents["train-images-idx3-ubyte"]).all()
    assert (test.targets == contents["t10k-labels-idx1-ubyte"]).all()
    assert isinstance(train.inputs, np.memmap) and train.num_classes == 10
    assert len(list(files.iterdir())) == 4


IMAGES, LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        (IMAGES, lambda raw: b"\0\0\x08\x01" + raw[4:], "3 dimensions"),
        (IMAGES, lambda _: b"", "nothing"),
        (IMAGES, lambda raw: raw[:10], "truncated"),
        (IMAGES, lambda raw: raw[:-1], "truncated"),
        (IMAGES, lambda raw: raw + b"x", "damaged"),
        (LABELS, lambda _: idx(np.zeros(6, np.uint8)), "6 labels for 7 images"),
        (LABELS, lambda raw: raw[:-1] + b"\x0a", "label 10 at position 6"),
    ],
)
def test_damaged_idx(files: Path, file: str, damage: Callable[[bytes], bytes], words: str) -> None:
    write_mnist(files, zipped=False)
    path = files / file
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words) as caught:
        load(DataSpec("mnist", dir=str(files)))
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-20], lambda _: b"no gzip", lambda raw: raw[:60] + b"?" * 9 + raw[69:]]
)
def test_damaged_gzip(files: Path, damage: Callable[[bytes], bytes]) -> None:
    write_mnist(files)
    path = files / f"{IMAGES}.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="gzip") as caught:
        load(DataSpec("mnist", dir=str(files)))
    assert str(path) in str(caught.value)


def test_missing_files_are_named(files: Path) -> None:
    write_mnist(files)
    (files / f"{LABELS}.gz").unlink()
    with pytest.raises(DataError, match=f"{files} has no {LABELS} "):
        load(DataSpec("mnist", dir=str(files)))
    with pytest.raises(DataError, match=r"no complete cifar10: expected data_batch_1"):
        load(DataSpec("cifar10", dir=str(files)))


# --- cifar ---


def batch(count: int, num_classes: int, seed: int) -> tuple[NDArray[np.uint8], list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, 3072), dtype=np.uint8), rng.integers(0, num_classes, count).tolist()


def write_cifar(directory: Path, num_classes: int, form: str, protocol: int = 2) -> tuple[Any, Any]:
    """The files of one form; returns images and labels of the training set."""
    names = [f"data_batch_{i}" for i in range(1, 6)] if num_classes == 10 else ["train"]
    directory.mkdir(parents=True, exist_ok=True)
    parts = []
    for seed, name in enumerate([*names, "test_batch" if num_classes == 10 else "test"]):
        data, labels = batch(2, num_classes, seed)
        parts.append((data, labels))
        if form == "python":
            key = b"labels" if num_classes == 10 else b"fine_labels"
            content: dict[Any, Any] = {
                b"data": data,
                key: labels,
                b"batch_label": b"one",
                b"filenames": [b"a", b"b"],
            }
            (directory / name).write_bytes(pickle.dumps(content, protocol))
        else:
            coarse = [[]] if num_classes == 10 else [[0]]
            records = [bytes([*coarse[0], label]) + row.tobytes() for row, label in zip(data, labels, strict=True)]
            (directory / f"{name}.bin").write_bytes(b"".join(records))
    train = parts[:-1]
    images = np.concatenate([data for data, _ in train]).reshape(-1, 3, 32, 32)
    return images, [label for _, labels in train for label in labels]


FORMS = [
    (10, "python", "cifar-10-batches-py"),
    (10, "binary", "cifar-10-batches-bin"),
    (100, "python", "cifar-100-python"),
    (100, "binary", "cifar-100-binary"),
]


@pytest.mark.parametrize(("num_classes", "form", "folder"), FORMS)
@pytest.mark.parametrize("place", ["flat", "folder", "archive"])
def test_cifar(files: Path, num_classes: int, form: str, folder: str, place: str) -> None:
    inside = files if place == "flat" else files / folder
    images, labels = write_cifar(inside, num_classes, form)
    if place == "archive":
        with tarfile.open(files / f"cifar-{num_classes}-{form}.tar.gz", "w:gz") as tar:
            tar.add(inside, folder)
        for path in inside.iterdir():
            path.unlink()
    train, test = arrays(f"cifar{num_classes}", dir=str(files))
    assert (train.inputs == images).all() and train.targets.tolist() == labels
    assert len(test) == 2 and train.num_classes == num_classes


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_cifar_pickles_of_any_protocol(files: Path, protocol: int) -> None:
    images, labels = write_cifar(files, 10, "python", protocol)
    train, _ = arrays("cifar10", dir=str(files))
    assert (train.inputs == images).all() and train.targets.tolist() == labels


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("exploded",)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (pickle.dumps({b"data": Bomb(), b"labels": [1]}), "asks for posix.mkdir"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8)}), "no 'labels'"),
        (pickle.dumps({b"data": np.zeros((1, 3071), np.uint8), b"labels": [1]}), "rows of 3072"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.int64), b"labels": [1]}), "rows of 3072"),
        (pickle.dumps({b"data": np.zeros((2, 3072), np.uint8), b"labels": [1]}), "1 labels for 2 images"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [-1]}), "label -1"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": ["cat"]}), "damaged"),
        (pickle.dumps({b"data": np.zeros((1, 3072), np.uint8), b"labels": [1]})[:-100], "damaged"),
        (b"", "damaged"),
        (b"plain text", "data_batch_3"),
    ],
)
def test_damaged_and_hostile_pickles(files: Path, content: bytes, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)
    write_cifar(files, 10, "python")
    path = files / "data_batch_3"
    path.write_bytes(content)
    with pytest.raises(DataError, match=words) as caught:
        load(DataSpec("cifar10", dir=str(files)))
    assert str(path) in str(caught.value)
    assert not (files / "exploded").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-1], "truncated"),
        (lambda _: b"", "truncated"),
        (lambda raw: b"\x0a" + raw[1:], "label 10"),
    ],
)
def test_damaged_binary(files: Path, damage: Callable[[bytes], bytes], words: str) -> None:
    write_cifar(files, 10, "binary")
    path = files / "data_batch_3.bin"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=words) as caught:
        load(DataSpec("cifar10", dir=str(files)))
    assert str(path) in str(caught.value)


def test_damaged_archive(files: Path) -> None:
    inside = files / "in"
    write_cifar(inside, 10, "python")
    archive = files / "cifar-10-python.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(inside, "cifar-10-batches-py")
    whole = archive.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"nothing of the kind"):
        archive.write_bytes(damaged)
        with pytest.raises(DataError, match=r"tar\.gz"):
            load(DataSpec("cifar10", dir=str(files)))
    (inside / "test_batch").unlink()
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(inside, "cifar-10-batches-py")
    with pytest.raises(DataError, match="does not contain test_batch"):
        load(DataSpec("cifar10", dir=str(files)))


def png(pixels: NDArray[np.uint8]) -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def write_parquet(path: Path, images: list[bytes], label_column: str, labels: list[int]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    cells = [{"bytes": image, "path": None} for image in images]
    parquet.write_table(pyarrow.table({"img": cells, label_column: labels}), path, row_group_size=2)


@pytest.mark.parametrize(("name", "column"), [("cifar10", "label"), ("cifar100", "fine_label")])
def test_parquet(files: Path, name: str, column: str) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    images = [png(image) for image in pixels]
    write_parquet(files / "plain" / "train-00000-of-00002.parquet", images[:3], column, [1, 2, 3])
    write_parquet(files / "plain" / "train-00001-of-00002.parquet", images[3:4], column, [4])
    write_parquet(files / "plain" / "test-00000-of-00001.parquet", images[4:], column, [5])
    train, test = arrays(name, dir=str(files))
    assert (train.inputs == pixels[:4].transpose(0, 3, 1, 2)).all() and train.targets.tolist() == [1, 2, 3, 4]
    assert (test.inputs[0] == pixels[4].transpose(2, 0, 1)).all() and test.targets.tolist() == [5]


def test_damaged_parquet(files: Path) -> None:
    good = png(np.zeros((32, 32, 3), np.uint8))
    train = files / "train.parquet"
    write_parquet(files / "test.parquet", [good], "label", [0])
    write_parquet(train, [good, good], "label", [0, 1])
    whole = train.read_bytes()
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: train.write_bytes(whole[:-10]), "not a complete parquet file"),
        (lambda: train.write_bytes(b""), "not a complete parquet file"),
        (lambda: write_parquet(train, [good, good[:60]], "label", [0, 1]), "readable image in row 1"),
        (lambda: write_parquet(train, [png(np.zeros((8, 9, 3), np.uint8))], "label", [0]), "9 x 8 in row 0"),
        (lambda: write_parquet(train, [good], "klass", [0]), "no column 'label'; it has img, klass"),
        (lambda: write_parquet(train, [good], "label", [12]), "label 12"),
    ]
    for damage, words in cases:
        damage()
        with pytest.raises(DataError, match=words) as caught:
            load(DataSpec("cifar10", dir=str(files)))
        assert str(train) in str(caught.value)


# --- folder ---


def write_images(directory: Path, counts: dict[str, int], size: tuple[int, int] = (20, 12)) -> None:
    image = pytest.importorskip("PIL.Image")
    for shade, (name, count) in enumerate(counts.items()):
        (directory / name).mkdir(parents=True)
        for number in range(count):
            image.new("RGB", size, (shade * 100, number, 0)).save(directory / name / f"{number:03}.png")


def folders(files: Path, **keys: Any) -> tuple[FolderImages, FolderImages]:
    train, test = load(DataSpec("folder", dir=str(files), **keys))
    assert isinstance(train, FolderImages) and isinstance(test, FolderImages)
    return train, test


@pytest.mark.parametrize("name", ["val", "test"])
def test_folder_with_splits(files: Path, name: str) -> None:
    write_images(files / "train", {"cat": 3, "dog": 2})
    write_images(files / name, {"cat": 1, "dog": 1})
    train, test = folders(files, options={"image_size": 16}, train_limit=4)
    assert len(train) == 4 and len(test) == 2 and train.classes == ("cat", "dog") and train.num_classes == 2
    image, label = train[3]
    assert image.shape == (3, 16, 16) and label == 1
    assert image[0].mean().item() == pytest.approx((100 / 255 - 0.485) / 0.229, abs=1e-5)


def test_folder_without_splits_is_split_by_name(files: Path) -> None:
    write_images(files, {"cat": 60, "dog": 60}, size=(2, 2))
    train, test = folders(files)
    assert 3 <= len(test) <= 25 and len(train) + len(test) == 120
    assert not set(train.files) & set(test.files)
    (files / "cat" / "000.png").unlink()
    assert set(folders(files)[1].files) == set(test.files) - {files / "cat" / "000.png"}


def test_folder_augmentation_draws_from_the_global_generator(files: Path) -> None:
    write_images(files / "train", {"cat": 1})
    write_images(files / "val", {"cat": 1})
    pixels = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    (files / "train" / "cat" / "000.png").write_bytes(png(pixels))
    train, test = folders(files, augment=("crop", "flip", "cutout"), options={"image_size": 16})
    seen = []
    for seed in (1, 1, 2):
        random.seed(seed)
        seen.append(train[0][0])
    assert (seen[0] == seen[1]).all() and (seen[0] != seen[2]).any()
    assert (test[0][0] == test[0][0]).all() and test.augment is None


def test_folder_mistakes(files: Path) -> None:
    with pytest.raises(DataError, match=r"needs data\.dir"):
        load(DataSpec("folder"))
    with pytest.raises(DataError, match="no subfolders"):
        folders(files)
    write_images(files / "train", {"cat": 1, "dog": 1})
    with pytest.raises(DataError, match=r"neither val/ nor test/"):
        folders(files)
    write_images(files / "val", {"cat": 1})
    with pytest.raises(DataError, match="'dog'"):
        folders(files)
    (files / "val" / "dog").mkdir()
    with pytest.raises(DataError, match="has no images"):
        folders(files)
    damaged = files / "val" / "dog" / "x.jpg"
    damaged.write_bytes(b"no image")
    with pytest.raises(DataError, match=str(damaged)):
        folders(files)[1][1]
    with pytest.raises(JobError, match="image_size"):
        folders(files, options={"image_sice": 3})


# --- text ---


def test_text(files: Path) -> None:
    raw = bytes(range(200)) * 5
    (files / "book.txt").write_bytes(raw)
    train, test = arrays("text", dir=str(files), options={"file": "book.txt", "context": 10})
    assert train.inputs.shape == (89, 10) and test.inputs.shape == (9, 10) and train.num_classes == 256
    assert train.inputs.tobytes() == raw[:890] and train.targets.tobytes() == raw[1:891]
    assert test.inputs[0].tobytes() == raw[900:910]
    assert train.inputs.dtype == np.uint8 and not train.inputs.flags.owndata
    tokens, following = train[0]
    assert tokens.tolist() == list(range(10)) and following.tolist() == list(range(1, 11))


def test_text_mistakes(files: Path) -> None:
    (files / "short.txt").write_bytes(b"x" * 1280)
    with pytest.raises(DataError, match=r"1280 bytes.*at least 1281"):
        arrays("text", options={"file": str(files / "short.txt")})
    (files / "short.txt").write_bytes(b"x" * 1281)
    assert len(arrays("text", options={"file": str(files / "short.txt")})[1]) == 1
    os.mkfifo(files / "pipe")
    with pytest.raises(DataError, match=r"pipe cannot be read \(Is a named pipe, not a file\)"):
        arrays("text", options={"file": str(files / "pipe")})
    with pytest.raises(DataError, match="no file"):
        arrays("text", options={"file": str(files / "none.txt")})
    with pytest.raises(JobError, match=r"data\.options\.file"):
        arrays("text")
    with pytest.raises(DataError, match=r"data\.augment"):
        arrays("text", options={"file": str(files / "short.txt")}, augment=("flip",))


# --- synthetic ---


def test_synthetic() -> None:
    options = {"num_samples": 50, "shape": [2, 10, 7], "num_classes": 3}
    train, test = arrays("synthetic", options=options)
    again, _ = arrays("synthetic", options=options)
    more, _ = arrays("synthetic", options={**options, "num_samples": 80})
    assert train.inputs.shape == (50, 2, 10, 7) and len(test) == 10 and train.num_classes == 3
    assert (train.inputs == again.inputs).all() and (more.inputs[:50] == train.inputs).all()
    assert (more.inputs[50:60] == test.inputs).all(), "test samples are the ones that follow"
    centres = np.stack([train.inputs[train.targets == label].mean(0) for label in range(3)])
    distances = ((test.inputs[:, None] - centres) ** 2).sum((2, 3, 4))
    assert (distances.argmin(1) == test.targets).all(), "classes can be told apart"
    for bad in ({"shape": [1, 2]}, {"shape": [0, 2, 2]}, {"num_samples": 0}, {"samples": 3}):
        with pytest.raises(JobError):
            arrays("synthetic", options=bad)


# --- names and import paths ---


def test_unknown_names() -> None:
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        load(DataSpec("cifar-10"))
    with pytest.raises(DataError, match="The names are digits, mnist"):
        load(DataSpec("xyzzy"))
    with pytest.raises(JobError, match=r"data\.options\.size"):
        load(DataSpec("digits", options={"size": 3}))


MODULE = """
import numpy as np
from paceline.data import ArraySet

def by_split(split, count=10):
    return [(split, i) for i in range(count)]

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

class Half:
    def __len__(self):
        return 7 / 2

    def __getitem__(self, index):
        return index

class Around:
    def __init__(self, inside):
        self.inside = inside

    def __getattr__(self, name):
        return getattr(self.inside, name)

def half():
    return Half(), Half()

def around():
    return Around([1]), Around([1])

number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_data_module.py").write_text(MODULE)
    (tmp_path / "own_broken_module.py").write_text("import a_module_that_is_not_there")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "own_data_module"


def test_import_path(own_module: str) -> None:
    train, test = load(DataSpec(f"{own_module}:by_split", options={"count": 5}, train_limit=2))
    assert len(train) == 2 and train[1] == ("train", 1) and test[4] == ("test", 4)
    train, test = load(DataSpec(f"{own_module}:both", test_limit=2))
    assert len(train) == 10 and len(test) == 2
    train, _ = load(DataSpec(f"{own_module}:images", augment=("crop",)))
    assert isinstance(train, ArraySet) and train.augment is not None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("own_data_module:nothing", "has no 'nothing'"),
        ("own_data_module:number", "should name a function or class"),
        ("own_data_module:stream", "lacks a length or samples by number"),
        ("own_data_module:single", "returned dict"),
        ("own_data_module:empty", "of type list, has no samples"),
        ("own_data_module:half", "of type Half, gives 3.5 as its length; its __len__ has to return a whole number"),
        ("own_data_module:around", "of type Around, lacks a length or samples by number"),
        ("no_such_module_at_all:build", "no module 'no_such_module_at_all'"),
        ("own_data_module.sub:build", "no module"),
        (":build", "not an import path"),
    ],
)
def test_import_path_mistakes(own_module: str, name: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load(DataSpec(name))


def test_a_bug_in_the_users_module_keeps_its_traceback(own_module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):
        load(DataSpec("own_broken_module:build"))
    with pytest.raises(TypeError):
        load(DataSpec(f"{own_module}:both", options={"cuont": 1}))


def test_augmenting_a_map_style_set_is_refused(own_module: str) -> None:
    with pytest.raises(DataError, match=r"data\.augment"):
        load(DataSpec(f"{own_module}:both", augment=("flip",)))


def test_missing_extras_are_named(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("train", "test"):
        (files / f"{name}.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[parquet\]'"):
        load(DataSpec("cifar10", dir=str(files)))
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(DataError, match=r"pip install 'paceline\[images\]'"):
        load(DataSpec("folder", dir=str(files)))


def test_importing_is_light() -> None:
    code = "import sys, paceline.data; print([m for m in ('PIL', 'pyarrow', 'rich') if m in sys.modules])"
    environ = {**os.environ, "PYTHONPATH": str(Path(paceline.data.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env=environ)
    assert done.stdout == "[]\n", done.stderr


# --- real data ---


@real_data
def test_real_mnist() -> None:
    train, test = arrays("mnist", dir=f"{REAL_DATA}/mnist")
    assert train.inputs.shape == (60000, 1, 28, 28) and test.inputs.shape == (10000, 1, 28, 28)
    assert train.targets[:5].tolist() == [5, 0, 4, 1, 9] and np.bincount(test.targets).tolist()[0] == 980
    assert train.mean == pytest.approx([train.inputs.mean() / 255], abs=1e-4)
    assert train.std == pytest.approx([train.inputs[:20000].std() / 255], abs=5e-3)


@real_data
@pytest.mark.slow
def test_real_cifar10() -> None:
    train, test = arrays("cifar10", dir=f"{REAL_DATA}/cifar10")
    assert train.inputs.shape == (50000, 3, 32, 32) and test.inputs.shape == (10000, 3, 32, 32)
    assert np.bincount(train.targets).tolist() == [5000] * 10
    pixels = train.inputs[::10] / 255
    assert train.mean == pytest.approx(pixels.mean((0, 2, 3)), abs=1e-2)
    assert train.std == pytest.approx(pixels.std((0, 2, 3)), abs=1e-2)
