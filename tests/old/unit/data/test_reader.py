"""Batches from arrays and from map-style data sets: values, types, layout, randomness."""

from __future__ import annotations

import multiprocessing
import random
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from paceline.data import ArrayReader, ArraySet, Augmentation, Loading, SampleRequest, read_samples
from paceline.data.augment import augment
from paceline.errors import DataError

CPU = torch.device("cpu")


def image_set(channels: int = 3, augmentation: Augmentation | None = None) -> ArraySet:
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 256, (20, channels, 6, 5), dtype=np.uint8)
    inputs.flags.writeable = False
    mean, std = (0.1, 0.5, 0.3)[:channels], (0.2, 0.4, 0.7)[:channels]
    return ArraySet(inputs, rng.integers(0, 10, 20), 10, mean, std, augmentation)


def by_definition(pixels: Tensor, array_set: ArraySet) -> Tensor:
    """(b, C, H, W) in float64."""
    mean = torch.tensor(array_set.mean, dtype=torch.float64)[:, None, None]
    std = torch.tensor(array_set.std, dtype=torch.float64)[:, None, None]
    return (pixels.double() / 255 - mean) / std


INDICES = np.array([3, 0, 19, 3])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_reads_normalised_images(channels: int, channels_last: bool, dtype: torch.dtype, tolerance: float) -> None:
    array_set = image_set(channels)
    inputs, targets = ArrayReader(array_set, CPU, dtype, channels_last, seed=0).read(0, INDICES, train=True)
    wanted = by_definition(torch.from_numpy(array_set.inputs[INDICES]), array_set)
    assert inputs.dtype == dtype
    torch.testing.assert_close(inputs.double(), wanted, rtol=tolerance, atol=tolerance)
    assert targets.dtype == torch.int64 and targets.tolist() == array_set.targets[INDICES].tolist()
    if channels_last:
        assert inputs.stride() == (30 * channels, 1, 5 * channels, channels)
    else:
        assert inputs.is_contiguous()


def test_memory_format_does_not_change_a_bit() -> None:
    array_set = image_set(augmentation=Augmentation(1, True, 2))
    plain = ArrayReader(array_set, CPU, torch.float32, False, 7).read(2, INDICES, True)[0]
    last = ArrayReader(array_set, CPU, torch.float32, True, 7).read(2, INDICES, True)[0]
    assert torch.equal(plain, last)


def test_augments_in_training_only() -> None:
    augmentation = Augmentation(crop_padding=2, flip=True, cutout_size=2)
    array_set = image_set(augmentation=augmentation)
    reader = ArrayReader(array_set, CPU, torch.float64, False, seed=4)
    pixels = torch.from_numpy(array_set.inputs[INDICES])
    wanted = by_definition(augment(pixels, augmentation, 4, 9, INDICES), array_set)
    torch.testing.assert_close(reader.read(9, INDICES, train=True)[0], wanted)
    torch.testing.assert_close(reader.read(9, INDICES, train=False)[0], by_definition(pixels, array_set))


def test_reads_nothing_for_no_samples() -> None:
    for channels_last in (False, True):
        reader = ArrayReader(image_set(augmentation=Augmentation(2, True, 2)), CPU, torch.float32, channels_last, 0)
        inputs, targets = reader.read(0, np.array([], np.int64), train=True)
        assert inputs.shape == (0, 3, 6, 5) and targets.shape == (0,)


def test_reads_tokens_of_any_width_as_int64() -> None:
    tokens = np.arange(61, dtype=np.uint16)
    array_set = ArraySet(tokens[:60].reshape(6, 10), tokens[1:].reshape(6, 10), 256)
    inputs, targets = ArrayReader(array_set, CPU, torch.float32, False, 0).read(0, np.array([5, 1]), True)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs[0].tolist() == list(range(50, 60)) and targets[1].tolist() == list(range(11, 21))


def test_array_set_is_a_map_style_data_set() -> None:
    array_set = image_set()
    inputs, targets = ArrayReader(array_set, CPU, torch.float32, False, 0).read(0, np.arange(20), False)
    loader: Any = torch.utils.data.DataLoader(array_set, batch_size=20)  # type: ignore[arg-type]
    ((loaded, labels),) = loader
    torch.testing.assert_close(loaded, inputs)
    assert torch.equal(labels, targets)
    assert len(array_set.take(7)) == 7 and len(array_set.take(100)) == 20
    assert np.shares_memory(array_set.take(7).inputs, array_set.inputs)


@pytest.mark.parametrize(
    "arguments",
    [
        (np.zeros((3, 1, 2, 2), np.uint8), np.zeros(2, np.int64), 10, (0.5,), (0.5,)),
        (np.zeros((3, 1, 2, 2), np.uint8), np.zeros(3, np.int64), 10, (0.5,), None),
        (np.zeros((3, 1, 2, 2), np.uint8), np.zeros(3, np.int64), 10, (0.5, 0.5), (0.5, 0.5)),
        (np.zeros((3, 4), np.uint8), np.zeros(3, np.int64), 10, (0.5,), (0.5,)),
        (np.zeros((3, 4), np.uint8), np.zeros((3, 4), np.uint8), 10, None, None, Augmentation(flip=True)),
    ],
)
def test_array_set_refuses_what_does_not_fit(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(DataError):
        ArraySet(*arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_resident", [True, False])
def test_cuda_gives_the_batches_of_the_cpu(is_resident: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_resident:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 0))
    array_set = image_set(augmentation=Augmentation(2, True, 3))
    cuda = torch.device("cuda")
    for channels_last in (False, True):
        ours = ArrayReader(array_set, cuda, torch.float32, channels_last, 0).read(0, INDICES, True)
        theirs = ArrayReader(array_set, CPU, torch.float32, channels_last, 0).read(0, INDICES, True)
        torch.testing.assert_close(ours[0].cpu(), theirs[0])
        assert torch.equal(ours[1].cpu(), theirs[1])


class Dice:
    """A data set whose samples are random in all three ways; remembers nothing."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"draws": torch.tensor(draws), "pair": (index, torch.ones(2, dtype=torch.int32))}


def stream(lists: list[list[int]], num_workers: int = 0, dataset: Any = None, **keys: Any) -> list[Any]:
    settings = {"seed": 3, "epoch": 1, "device": CPU, "dtype": torch.float32, **keys}
    return list(together(Loading(dataset or Dice(), num_workers=num_workers), lists, **settings))


def together(loading: Loading, lists: list[list[int]], **settings: Any) -> Iterator[Any]:
    """The samples of each list, collated together by torch's default."""
    for (content,) in read_samples(
        loading, [SampleRequest((np.array(numbers, np.int64),)) for numbers in lists], **settings
    ):
        yield content


def draws(batches: list[Any]) -> dict[int, list[float]]:
    return {
        int(index): row.tolist()
        for batch in batches
        for index, row in zip(batch["pair"][0], batch["draws"], strict=True)
    }


def test_streams_the_lists_in_order_with_draws_that_belong_to_the_sample() -> None:
    lists = [[5, 2, 9], [0], [11, 4]]
    batches = stream(lists)
    assert [batch["pair"][0].tolist() for batch in batches] == lists
    found = draws(batches)
    assert len({tuple(row) for row in found.values()}) == 6
    assert draws(stream([[4, 0], [9, 11, 5, 2]])) == found
    assert draws(stream(lists, num_workers=2)) == found
    assert draws(stream(lists, epoch=2)) != found
    assert draws(stream(lists, seed=4)) != found


def test_streaming_leaves_the_callers_generators_alone() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = random.random(), np.random.rand(), torch.rand(()).item()
    for num_workers in (0, 1):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        stream([[1, 2], [3]], num_workers)
        assert (random.random(), np.random.rand(), torch.rand(()).item()) == wanted


def test_the_callers_own_draws_do_not_reach_the_samples() -> None:
    alone = draws(stream([[1], [2]]))
    found: dict[int, list[float]] = {}
    for batch in together(Loading(Dice()), [[1], [2]], seed=3, epoch=1, device=CPU):
        torch.rand(5), random.random()
        found |= draws([batch])
    assert found == alone


class _OnesOwn(TensorDataset):
    """A subclass may draw, so its samples are made one by one."""


def test_rows_of_tensors_are_gathered_to_what_single_samples_collate_to() -> None:
    tensors = torch.arange(24).view(6, 2, 2), torch.arange(6.0)
    cases: list[list[list[int]]] = [[[4, 0, 4]], [[]]]
    for lists in cases:
        gathered, one_by_one = (
            list(together(Loading(kind(*tensors)), lists, seed=0, epoch=0, device=CPU))
            for kind in (TensorDataset, _OnesOwn)
        )
        assert type(gathered[0]) is type(one_by_one[0])
        for mine, wanted in zip(gathered[0] or (), one_by_one[0] or (), strict=True):
            assert torch.equal(mine, wanted) and mine.dtype == wanted.dtype


def test_only_float64_is_cast() -> None:
    assert stream([[0]], dtype=torch.bfloat16)[0]["draws"].dtype == torch.float32
    batch = stream([[0]], dtype=torch.float64)[0]
    assert batch["draws"].dtype == torch.float64 and batch["pair"][1].dtype == torch.int32


def test_an_empty_list_gives_none() -> None:
    batches = stream([[0], [], [1]])
    assert batches[1] is None and len(batches) == 3


class Damaged:
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        if index == 1:
            raise DataError("b.png is not a readable image; remove it.")
        if index == 2:
            raise KeyError("a bug")
        return torch.zeros(1)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_exit_in_a_data_set_keeps_its_code(num_workers: int) -> None:
    class Leaves(Dice):
        def __getitem__(self, index: int) -> Any:
            sys.exit(3)

    with pytest.raises(SystemExit) as caught:
        stream([[0], [1]], num_workers, Leaves())
    assert caught.value.code == 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_that_raises_stop_iteration_does_not_end_the_epoch(num_workers: int) -> None:
    class Stops(Dice):
        def __getitem__(self, index: int) -> Any:
            return next(iter([]))

    with pytest.raises(RuntimeError, match="raised StopIteration"):
        stream([[0], [1]], num_workers, Stops())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_error_stays_one_sentence(num_workers: int) -> None:
    with pytest.raises(DataError) as caught:
        stream([[0], [0, 1]], num_workers, Damaged())
    assert str(caught.value) == "b.png is not a readable image; remove it."
    with pytest.raises(KeyError):
        stream([[2]], num_workers, Damaged())


def test_loader_processes_end_with_the_stream() -> None:
    for batches in (
        together(Loading(Dice(), num_workers=2), [[0]] * 20, seed=0, epoch=0, device=CPU),
        together(Loading(Damaged(), num_workers=2), [[0], [1]], seed=0, epoch=0, device=CPU),
    ):
        before = set(multiprocessing.active_children())  # a session's own servers, for instance
        next(batches)
        processes = set(multiprocessing.active_children()) - before
        assert len(processes) == 2
        try:
            next(batches)
        except DataError as error:
            kept = error  # with its traceback, and all that hangs on it
            assert kept.__traceback__ is not None
        else:
            batches.close()  # type: ignore[attr-defined]
        assert not any(process.is_alive() for process in processes)
