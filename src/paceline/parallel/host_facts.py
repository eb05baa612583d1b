"""What the hosts of a mesh's workers tell each other in a step. Devices do not know it, so none is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from paceline.parallel.axes import Axes
from paceline.process_groups import device_of, open_host_group

Told = tuple[list[bool], list[bool]]


class HostFacts:
    """Exchanges facts of all workers, and of each parameter those of the workers that have it: whether any says yes."""

    def __init__(self, axes: Axes, num_parameters: int, timeout_s: float) -> None:
        """A collective of all workers of the run.

        Args:
            num_parameters: the most that this worker, which may hold a stage, will speak of.
        """
        self._group = axes.world
        if device_of(axes.world).type != "cpu":
            self._group = open_host_group(timeout_s)
        most = torch.tensor(num_parameters)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._group)
        self._num_stages, self._num_places = axes.mesh.pp, int(most)
        self._stage = axes.mesh.place(dist.get_rank(axes.world))["pp"]

    def begin(self, facts: Sequence[bool], of_parameters: Sequence[bool]) -> Callable[[], Told]:
        """Tell the others; what is returned waits for them, and says of what any of them says yes. A collective."""
        message = torch.zeros(len(facts) + self._num_stages * self._num_places, dtype=torch.uint8)
        first = len(facts) + self._stage * self._num_places
        mine = slice(first, first + len(of_parameters))
        message[: len(facts)] = torch.tensor(facts)
        message[mine] = torch.tensor(of_parameters, dtype=torch.uint8)
        work = dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None

        def told() -> Told:
            work.wait()
            known = message.bool()
            return known[: len(facts)].tolist(), known[mine].tolist()

        return told
