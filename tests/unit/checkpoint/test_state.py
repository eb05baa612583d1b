"""What a run keeps comes back as it was: any nesting of tensors, numbers, texts, lists and dictionaries; anything
else is refused when it is saved. Weights are exported under plain names in a file that any safetensors reader
takes."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import paceline
from paceline.errors import CheckpointError
from tests.unit.checkpoint.saving import small_model, train

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint16,
    torch.int8,
    torch.uint8,
    torch.bool,
]
TENSORS = st.builds(
    lambda shape, dtype, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype),
    st.lists(st.integers(0, 3), max_size=3),
    st.sampled_from(DTYPES),
    st.integers(0, 99),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), TENSORS)
KEYS = st.one_of(st.text(max_size=4), st.sampled_from(["tensor", "counter", "pairs", "number", "a/b", "__metadata__"]))
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3),
        st.dictionaries(st.one_of(KEYS, st.integers()), st.integers(), max_size=3).map(Counter),
    ),
    max_leaves=8,
)


def bits(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return (one.dtype, one.shape, bits(one)) == (other.dtype, other.shape, bits(other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other) or (one != one and other != other)  # not a number


@given(TREES)
@settings(max_examples=25)
@pytest.mark.budget(processor_s=9)
def test_any_tree_of_plain_values_comes_back(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        train(folder, 1, kept=tree)
        assert equal(train(folder, 1).kept, tree)


def test_a_shared_tensor_is_shared_again_and_a_numpy_number_is_a_number(tmp_path: Path) -> None:
    one = torch.arange(6.0).view(2, 3)
    train(tmp_path, 1, kept={"first": one, "again": [one], "view": one.T, "number": np.float32(0.5)})
    kept = train(tmp_path, 1).kept
    assert kept["first"] is kept["again"][0]
    assert torch.equal(kept["view"], one.T)
    assert kept["number"] == 0.5 and type(kept["number"]) is float


ALIENS = [
    torch.zeros(2, dtype=torch.complex128),
    torch.eye(2).to_sparse(),
    object(),
    {1, 2},
    b"bytes",
    {(1, 2): 3},
]


@pytest.mark.parametrize("alien", ALIENS)
def test_what_a_checkpoint_cannot_hold_is_refused_with_its_place_before_the_first_step(
    tmp_path: Path, alien: object
) -> None:
    model = small_model()
    model.register_forward_pre_hook(lambda *_: pytest.fail("a step was made"))
    with pytest.raises(CheckpointError, match="mine"):
        train(tmp_path, 1, model=model, kept={"mine": alien})


class Tied(nn.Module):
    """Two names for one matrix, a buffer, and names with dots."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.again = self.inner
        self.register_buffer("count", torch.tensor(3))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.again(self.inner(inputs))
        return found


@pytest.mark.parametrize("make", [small_model, Tied])
def test_weights_are_exported_under_the_names_of_the_model(tmp_path: Path, make: Any) -> None:
    trained = train(tmp_path / "run", 3, model=make())
    target = tmp_path / "model.safetensors"
    exported = paceline.checkpoint.export(tmp_path / "run", target)
    assert exported.step == 3
    model = make()
    load_model(model, target)
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained.weights[name]), name
    if make is Tied:
        assert len(load_file(target)) == 3  # what is tied is there once


def test_an_export_replaces_a_file_only_by_force_and_is_complete_or_absent(tmp_path: Path) -> None:
    train(tmp_path / "run", 1)
    target = tmp_path / "model.safetensors"
    target.write_bytes(b"mine")
    with pytest.raises(CheckpointError, match="there already"):
        paceline.checkpoint.export(tmp_path / "run", target)
    assert target.read_bytes() == b"mine"
    paceline.checkpoint.export(tmp_path / "run", target, force=True)
    assert load_file(target)
    with pytest.raises(CheckpointError, match="nowhere"):
        paceline.checkpoint.export(tmp_path / "nowhere", tmp_path / "other.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


def test_any_number_in_a_model_of_bfloat16_is_exported_as_it_is(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).bfloat16()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    with paceline.init(global_batch_size=2, virtual_shards=1, checkpoint_dir=tmp_path / "run", progress=False) as run:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        run.save()
    paceline.checkpoint.export(tmp_path / "run", tmp_path / "model.safetensors")
    found = load_file(tmp_path / "model.safetensors")
    assert all(
        torch.equal(found[name], value) and found[name].dtype == torch.bfloat16 for name, value in weights.items()
    )


def test_an_optimizer_state_that_is_finer_than_the_weights_stays_so() -> None:
    model = nn.Linear(2, 1, bias=False).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state[model.weight]["momentum_buffer"] = torch.full((1, 2), 1 + 2**-20)
    with paceline.init(global_batch_size=2, virtual_shards=2, progress=False) as run:
        run.prepare(model, optimizer)
        assert optimizer.state[model.weight]["momentum_buffer"].tolist() == [[1 + 2**-20] * 2]
