"""Batches that travel to the GPU while it computes on those before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch

from paceline.containers import tensors

T = TypeVar("T")


def ahead(contents: Iterable[T], device: torch.device) -> Iterator[T]:
    """The same contents, each read while the one before is trained on; on a CPU as they are.

    What reading enqueues on the GPU (copies from pinned memory, augmentation) runs on a stream of its own. An error is
    raised in the place of the content that it belongs to.
    """
    if device.type != "cuda":
        yield from contents
        return
    reading = iter(contents)
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))  # a data set that lies on the GPU may still be on its way

    def read() -> list[T] | Exception:
        """The next content; an empty list at the end."""
        try:
            with torch.cuda.stream(side):
                return [next(reading)]
        except StopIteration:
            return []
        except Exception as error:
            return error

    found = read()
    while found:
        if isinstance(found, Exception):
            raise found
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(side)  # for this content, not for the next one
        content = found[0]
        for tensor in tensors(content):
            if tensor.is_cuda:
                tensor.record_stream(computing)  # its memory is not the side stream's again before it is used
        found = read()
        yield content
