"""Facts about parameters that the workers of a mesh exchange over the CPU in every step, without waiting for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.parallel.axes import Axes
from paceline.process_groups import device_of, open_host_group


class HostFacts:
    """All-reduces booleans with OR: one for each parameter, over the workers that hold it."""

    def __init__(self, axes: Axes, num_parameters: int, timeout_s: float) -> None:
        """A collective of all workers of the run.

        Args:
            num_parameters: the largest number of parameters that this worker passes to `begin`.
        """
        self._group = axes.world
        if device_of(axes.world).type != "cpu":
            self._group = open_host_group(timeout_s)
        most = torch.tensor(num_parameters)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        self._num_stages, self._num_places = axes.mesh.pp, int(most)
        self._stage = axes.mesh.place(dist.get_rank(axes.world))["pp"]

    def begin(self, of_parameters: Sequence[bool]) -> Callable[[], list[bool]]:
        """Begin the exchange; the returned function waits for it and returns the results. A collective.

        Args:
            of_parameters: one for each parameter of this worker, in the same order on all workers of its stage."""
        if not self._num_places:
            return list
        message = torch.zeros(self._num_stages * self._num_places, dtype=torch.uint8)
        first = self._stage * self._num_places
        mine = slice(first, first + len(of_parameters))
        message[mine] = torch.tensor(of_parameters, dtype=torch.uint8)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None

        def told() -> list[bool]:
            work.wait()
            return message.bool()[mine].tolist()

        return told
