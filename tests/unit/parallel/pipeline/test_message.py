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
    assert [one.order for one in received.tensors] == [(), (0, 2, 3, 1), (), ()]
    assert len(received.differentiable) == 1
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


def test_a_tensor_form_makes_room_in_the_same_order() -> None:
    image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    form = TensorForm.of(image)
    assert form.empty(torch.device("cpu")).stride() == image.stride()
    assert form.in_memory_order(image).is_contiguous()
