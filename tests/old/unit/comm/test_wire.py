"""What a wire format may lose, and what it may not."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from paceline.comm.wire import INT8_CHUNK, WIRE_FORMATS
from tests.old.unit.comm.buckets import draw

FORMATS = pytest.mark.parametrize("name", sorted(WIRE_FORMATS))
LENGTHS = st.one_of(st.integers(0, 5), st.integers(INT8_CHUNK - 2, INT8_CHUNK + 2), st.integers(0, 3 * INT8_CHUNK))
SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float32, torch.float64])


def _round_trip(name: str, values: Tensor) -> Tensor:
    wire = WIRE_FORMATS[name]
    result = torch.full_like(values, 123.0)
    wire.decode(wire.encode(values), result)
    return result


@FORMATS
@given(length=LENGTHS, dtype=DTYPES)
def test_a_message_is_as_long_as_its_receiver_expects(name: str, length: int, dtype: torch.dtype) -> None:
    wire, values = WIRE_FORMATS[name], torch.ones(length, dtype=dtype)
    message, awaited = wire.encode(values), wire.message_for(values)
    assert (message.shape, message.dtype) == (awaited.shape, awaited.dtype)
    assert message.dim() == 1
    assert message.is_contiguous()
    num_bytes = {
        "float32": values.element_size() * length,
        "bfloat16": 2 * length,
        "float16": 2 * length,
        "int8": length + 4 * math.ceil(length / INT8_CHUNK),
    }
    assert message.numel() * message.element_size() == num_bytes[name]


@given(length=LENGTHS, seed=SEEDS, dtype=DTYPES)
def test_values_as_they_are_come_back_as_they_were(length: int, seed: int, dtype: torch.dtype) -> None:
    values = draw(length, seed=seed, dtype=dtype)
    assert torch.equal(_round_trip("float32", values), values)


@given(length=LENGTHS, seed=SEEDS, exponent=st.floats(-35, 35), dtype=DTYPES)
def test_bfloat16_is_off_by_half_of_its_last_bit_at_any_size(
    length: int, seed: int, exponent: float, dtype: torch.dtype
) -> None:
    values = draw(length, seed=seed, dtype=dtype) * 10**exponent
    error = (_round_trip("bfloat16", values) - values).abs()
    # A float64 is rounded twice on its way: once more to float32.
    assert bool((error <= values.abs() * (2**-8 + 2**-23) + 1e-40).all())


@given(length=LENGTHS, seed=SEEDS, exponent=st.floats(-10, 4), dtype=DTYPES)
def test_float16_is_off_by_half_of_its_last_bit_above_its_smallest_number(
    length: int, seed: int, exponent: float, dtype: torch.dtype
) -> None:
    values = draw(length, seed=seed, dtype=dtype) * 10**exponent
    values.clamp_(-65504, 65504)
    error = (_round_trip("float16", values) - values).abs()
    assert bool((error <= values.abs() * (2**-11 + 2**-23) + 2**-25).all())


@given(length=LENGTHS, seed=SEEDS, exponent=st.floats(-44, 37))
def test_int8_is_off_by_half_a_step_of_its_chunk_and_keeps_the_largest(length: int, seed: int, exponent: float) -> None:
    values = (draw(length, seed=seed, dtype=torch.float64) * 10**exponent).float()
    result = _round_trip("int8", values)
    for chunk, decoded in zip(values.split(INT8_CHUNK), result.split(INT8_CHUNK), strict=True):
        if not chunk.numel():
            continue
        scale = float(chunk.abs().max())
        error = (decoded.double() - chunk.double()).abs()
        # The second term is the distance of the smallest floats there are.
        assert float(error.max()) <= scale / 254 * (1 + 1e-5) + 2**-149
        largest = chunk.abs().argmax()
        assert decoded[largest] == chunk[largest]


@pytest.mark.parametrize("constant", [0.0, -0.0, 1.0, -3.7, 1e-45, 1e-38, 3e-37, 3.4e38])
@pytest.mark.parametrize("length", [0, 1, INT8_CHUNK, INT8_CHUNK + 1])
def test_int8_is_exact_where_all_values_are_of_one_size(constant: float, length: int) -> None:
    values = torch.full((length,), constant)
    values[::3] *= -1
    assert torch.equal(_round_trip("int8", values), values)


@FORMATS
@given(length=st.integers(1, 3 * INT8_CHUNK), data=st.data())
def test_an_overflow_arrives(name: str, length: int, data: st.DataObject) -> None:
    place = data.draw(st.integers(0, length - 1))
    start = place // INT8_CHUNK * INT8_CHUNK
    for dtype, bad in product((torch.float32, torch.float64), (math.nan, math.inf, -math.inf)):
        values = torch.ones(length, dtype=dtype)
        values[place] = bad
        result = _round_trip(name, values)
        assert not math.isfinite(result[place])
        # It does not reach further than the values that share its scale.
        assert torch.equal(result[:start], values[:start])
        assert torch.equal(result[start + INT8_CHUNK :], values[start + INT8_CHUNK :])
        # Added to something sound, it is still there.
        into = torch.ones_like(values)
        WIRE_FORMATS[name].add(WIRE_FORMATS[name].encode(values), into)
        assert not math.isfinite(into[place])


@pytest.mark.parametrize(("name", "too_large"), [("float16", 70_000.0), ("bfloat16", 3.4e38), ("int8", 1e39)])
def test_what_a_format_cannot_hold_is_not_finite(name: str, too_large: float) -> None:
    assert not math.isfinite(_round_trip(name, torch.tensor([too_large], dtype=torch.float64)))


@FORMATS
@given(length=LENGTHS, offset=st.integers(0, 7), seed=SEEDS, dtype=DTYPES)
def test_slices_that_begin_anywhere(name: str, length: int, offset: int, seed: int, dtype: torch.dtype) -> None:
    """Algorithms cut vectors and messages where they like; nothing outside the slice is touched."""
    wire = WIRE_FORMATS[name]
    values = draw(length, seed=seed, dtype=dtype)
    whole = torch.full((offset + length + 3,), 7.0, dtype=dtype)
    whole[offset : offset + length] = values
    expected = _round_trip(name, values)

    sent = wire.encode(whole[offset : offset + length])
    buffer = torch.empty(offset + sent.numel(), dtype=sent.dtype)
    message = buffer[offset:]
    message.copy_(sent)
    into = torch.full_like(whole, -5.0)
    wire.decode(message, into[offset : offset + length])
    assert torch.equal(into[offset : offset + length], expected)
    wire.add(message, into[offset : offset + length])
    assert torch.equal(into[offset : offset + length], expected + expected)
    assert bool((into[:offset] == -5.0).all())
    assert bool((into[offset + length :] == -5.0).all())


@FORMATS
def test_sums_are_formed_in_the_dtype_of_the_values(name: str) -> None:
    """A thousand times a number that would vanish beside the sum in the format's own dtype."""
    wire = WIRE_FORMATS[name]
    message = wire.encode(torch.ones(1))
    total = torch.full((1,), 4096.0)
    for _ in range(1000):
        wire.add(message, total)
    assert float(total) == 5096.0
