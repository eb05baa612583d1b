"""`StepRow`: a training step on some workers, with its time where it was measured: a row of a table of steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.spec.algorithm import AlgorithmName
from paceline.spec.codec import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt


@dataclass(frozen=True)
class StepRow:
    """One step. The rows that `probe` writes, rows of a file, and the steps that a forecast is asked for are alike."""

    workers_per_node: tuple[PositiveInt, ...]
    micro_batch_size: PositiveInt
    """Samples of one pass of one worker."""
    num_passes: PositiveInt = 1
    """Passes of a worker in a step, which accumulate gradients and then sum them once."""
    algorithm: AlgorithmName = "all_reduce"
    gradient_bytes: PositiveFloat | None = None
    """Bytes of gradients that a worker sums in a step; None: as in the other rows."""
    link_bytes_per_s: PositiveFloat | None = None
    """A datasheet's rate of a node's link to the others, which is a bound; None: as in the other rows."""
    sync_every: PositiveInt = 1
    """Steps between two sums."""
    step_time_s: PositiveFloat | None = None
    """None: it was not measured."""
    sync_time_s: NonNegativeFloat | None = None
    """How long a worker waited for gradients; None: not measured."""
    loading_s: NonNegativeFloat | None = None
    """How long a worker waited for its samples; None: not measured."""
    spread: NonNegativeFloat = 0.0
    """Standard deviation of the logarithm of the step's time; 0: not known."""
    peak_memory_bytes: NonNegativeInt | None = None
    """The most that tensors of one worker held of its GPU; None: not measured."""

    def unmeasured(self) -> StepRow:
        """The same step without what was measured of it."""
        return replace(self, step_time_s=None, sync_time_s=None, loading_s=None, spread=0.0, peak_memory_bytes=None)

    @property
    def num_nodes(self) -> int:
        return len(self.workers_per_node)

    @cached_property
    def num_workers(self) -> int:
        return sum(self.workers_per_node)

    @cached_property
    def most_on_node(self) -> int:
        return max(self.workers_per_node)

    @property
    def samples_per_worker(self) -> int:
        """Samples that one worker computes in a step."""
        return self.micro_batch_size * self.num_passes

    @property
    def global_batch_size(self) -> int:
        return self.samples_per_worker * self.num_workers

    @property
    def layout_name(self) -> str:
        """ "16 x 4" for 16 equal nodes of 4, else "2+4"."""
        counts = set(self.workers_per_node)
        return f"{self.num_nodes} x {counts.pop()}" if len(counts) == 1 else "+".join(map(str, self.workers_per_node))
