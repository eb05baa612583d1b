"""Descriptions of what stages send each other come through JSON unchanged, and call nothing but containers."""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from paceline.errors import ModelError
from paceline.parallel.pipeline.message import MessageForm, TensorForm, from_bytes, to_bytes


class Pair(NamedTuple):
    first: Any
    second: Any


def through_json(values: list[Any]) -> tuple[MessageForm, MessageForm, list[Tensor]]:
    form, tensors = MessageForm.of(values)
    return form, MessageForm.from_plain(from_bytes(to_bytes(form.to_plain()))), tensors


def test_values_come_through_with_their_types() -> None:
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    values: list[Any] = [
        torch.zeros(3, dtype=torch.bfloat16, requires_grad=True),
        Pair(image, {"a": (1, 2.5), 3: [True, None]}),
        image.shape,
        torch.float16,
        torch.device("cpu"),
        OrderedDict(x=float("inf")),
        image.max(1),
        "text",
    ]
    form, received, tensors = through_json(values)
    assert received == form
    assert isinstance(received.values[1], Pair) and tuple(received.values[2]) == image.shape
    assert [one.strides for one in received.tensors] == [(), image.stride(), (), ()]
    assert [one.dtype for one in received.gradients] == [torch.bfloat16]
    assert [tensor.shape for tensor in tensors] == [one.shape for one in received.tensors]
    assert received.filled(tensors)[1].second == values[1].second


def test_what_cannot_be_described_gets_a_sentence() -> None:
    with pytest.raises(ModelError, match="A set would have to be sent from one stage of the pipeline to the next"):
        MessageForm([{1, 2}]).to_plain()


@pytest.mark.parametrize("kind", [("os", "system"), ("builtins", "exec"), ("subprocess", "Popen")])
def test_a_description_calls_nothing_but_containers(kind: tuple[str, str]) -> None:
    text = json.dumps([{"container": [*kind, None], "values": ["true"]}])
    with pytest.raises(KeyError):
        MessageForm.from_plain(json.loads(text))


def _views() -> dict[str, Tensor]:
    image = torch.randn(4, 6, 5, 7)
    return {
        "contiguous": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "channels last, of one pixel": torch.randn(4, 8, 1, 1).to(memory_format=torch.channels_last),
        "slice": image[:, 1:3],
        "part": image.view(-1)[3:11],
        "transposed": image.transpose(0, 2),
        "every second": image[..., ::2],
        "chunk, transposed": image.chunk(3, 1)[1].transpose(1, 2),
        "expanded": image.mean(1, keepdim=True).expand(image.shape),
        "expanded number": torch.tensor(3.0).expand(2, 3),
        "overlapping": torch.randn(20).unfold(0, 4, 2),
        "number": torch.tensor(1.0),
        "empty": image[:, :, :0],
    }


@pytest.mark.parametrize("name", _views())
def test_a_received_tensor_lies_in_memory_as_the_sent_one_did(name: str) -> None:
    sent = _views()[name]
    form = TensorForm.of(sent)
    on_the_way, room = form.pack(sent), form.packed(torch.device("cpu"))
    assert on_the_way.is_contiguous() and on_the_way.shape == room.shape
    received = form.unpack(room.copy_(on_the_way))
    assert torch.equal(received, sent) and received.stride() == sent.stride()
    assert received.numel() == 0 or (received.data_ptr() - sent.storage_offset() * sent.element_size()) % 64 == 0


@pytest.mark.parametrize("name", _views())
def test_a_gradient_has_the_order_of_what_it_is_of_without_gaps(name: str) -> None:
    of, gradient = TensorForm.of(_views()[name]).gradient, torch.randn(_views()[name].shape)
    received = of.unpack(of.packed(torch.device("cpu")).copy_(of.pack(gradient)))
    assert torch.equal(received, gradient)
    assert received.untyped_storage().nbytes() == gradient.nbytes
