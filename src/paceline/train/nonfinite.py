"""The finiteness check of a step: whether its loss and gradients are finite, before they change the weights.

Either the host waits for the result before the update. Or the check is deferred: the GPU itself skips an update that is
not finite, and the host reads the result while the next step's gradients are computed. The check is deferred only while
steps are finite: after a skipped step the host waits for it until a step is finite again, so that a run ends in the
same step either way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim import SGD, Optimizer

from paceline.dtensor_type import is_dtensor, local_shard
from paceline.errors import ModelError
from paceline.object_collectives import all_gather_objects
from paceline.parallel.layout import norm_of
from paceline.train.optim import FUSED, parts_of
from paceline.train.session import Session
from paceline.train.state import Trained
from paceline.words import and_more

MOST_IN_A_ROW = 10
"""The run ends after this many consecutive steps without an update."""

_SHOWN_SAMPLES = 8


class NonFiniteGuard:
    """Looks at the loss and gradients of every step before they become an update."""

    def __init__(self, session: Session, trained: Trained) -> None:
        self._session = session
        self._trained = trained
        self._reaction = session.state.job.nonfinite
        trained.catch_up = self.catch_up
        self._late: Callable[[], None] | None = None
        """Reads the result of a check on the GPU, which has made or skipped the update."""

    @property
    def may_be_late(self) -> bool:
        """Whether the next check may be deferred.

        It may not if a step that is not finite has other effects than a skipped update, workers hold shards of the
        gradient, or the host has to wait anyway to find out about lost workers.
        """
        return (
            self._reaction == "skip"
            and not self._trained.num_nonfinite
            and self._trained.engine.holds_all
            and self._session.peers is None
        )

    def allows_update(self, step: int, loss: Tensor, norm: Callable[[], Tensor], samples: NDArray[Any]) -> bool:
        """Whether to make the update after `step` others; the same answer on all workers that aggregate every step.

        `norm` returns the norm of the whole model's gradient, a scalar; a collective if workers hold shards. Raises
        `ModelError` where the run is to end because of this step, `PeerLost` where a worker is gone.
        """
        is_ignored = self._reaction == "ignore"
        # The scaler skips a step that overflows under its loss scale, and scales less.
        loss_alone = self._trained.precision.scaler.is_enabled()
        is_good = is_ignored or is_finite(torch.stack([loss] if loss_alone else [loss, norm().to(loss)]))
        self._session.check_peers(has_waited=not is_ignored)
        if is_good:
            self._trained.num_nonfinite = 0
            return True
        parameters = self._trained.model.named_parameters()
        gradients = {name: local_shard(p.grad) for name, p in parameters if p.grad is not None}
        culprits = [name for name, gradient in gradients.items() if not bool(torch.isfinite(gradient).all())]
        if not self._trained.engine.holds_all:
            found = set().union(*all_gather_objects(culprits, self._session.world.group))
            culprits = [name for name in self._trained.names.first if name in found]  # in the model's order
        self.leave_out(step, loss, culprits, samples)
        return False

    def leave_out(self, step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> None:
        """React to a step whose loss or gradient is not finite, and that makes no update. Raises `ModelError` where the
        run is to end because of this step."""
        num_in_a_row = self._trained.num_nonfinite + 1
        wrong = _describe(step, loss, culprits, samples)
        if self._reaction == "stop":
            raise ModelError(f"{wrong}. The run ends, as nonfinite = 'stop' says; lower optim.lr or look at the data.")
        if num_in_a_row >= MOST_IN_A_ROW:
            raise ModelError(f"{wrong}. That is the {MOST_IN_A_ROW}th in a row; lower optim.lr or look at the data.")
        if self._reaction == "skip":
            self._session.say(f"{wrong}. The step is skipped.")
        elif (checkpoint := self._session.roll_back()) is not None:
            self._session.say(f"{wrong}. Weights and optimizer are again those of {checkpoint}; the data goes on.")
        else:
            raise ModelError(f"{wrong}. There is no checkpoint yet to go back to; lower optim.lr or look at the data.")
        self._trained.num_nonfinite = num_in_a_row  # a step that ends the run is not made, and repeated by a resume

    def judge_on_device(self, step: int, loss: Tensor, samples: NDArray[Any]) -> Tensor:
        """1 if the update is to be skipped, else 0: a float32 scalar on the device. The host reads it in `catch_up`.
        Only for steps whose check `may_be_late`."""
        having = [(name, p.grad) for name, p in self._trained.model.named_parameters() if p.grad is not None]
        names = [name for name, _ in having]
        found = torch.stack([loss, *(norm_of(gradient).to(loss) for _, gradient in having)])
        in_host_memory = found.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        # Under a loss scale, whose scaler checks the gradients, only the loss.
        num_judged = 1 if self._trained.precision.scaler.is_enabled() else len(found)

        def read() -> None:
            arrived.synchronize()  # of a step whose work is followed by that of the next
            if not is_finite(in_host_memory[:num_judged]):
                self._trained.num_nonfinite += 1
                culprits = [name for name, norm in zip(names, in_host_memory[1:], strict=True) if not norm.isfinite()]
                self._session.say(f"{_describe(step, in_host_memory[0], culprits, samples)}. The step is skipped.")

        self._late = read
        # As `is_finite`: a loss or a norm that is not finite makes the sum so, and infinity times 0 is NaN.
        whole: Tensor = torch.linalg.vector_norm(found[1:num_judged])
        return ((found[0] + whole) * 0 != 0).float()

    def catch_up(self) -> None:
        """Read the result of the last step's check if it is pending, and tell the user if its update was skipped."""
        late, self._late = self._late, None
        if late is not None:
            late()


def is_finite(found: Tensor) -> bool:
    """Whether a loss and norms of gradients, in one 1-D tensor, are finite; waits for the device that they are on.

    Gradients whose squared norm overflows float32, or their own dtype if that is wider, count as infinite, as they do
    if the norm of all of them is computed on the device.
    """
    loss, *norms = found.tolist()
    return math.isfinite(loss) and math.hypot(*norms) <= math.sqrt(torch.finfo(found.dtype).max)


def _describe(step: int, loss: Tensor, culprits: Sequence[str], samples: NDArray[Any]) -> str:
    """What is not finite in step `step`, and the numbers of the samples in its batch."""
    what = [] if bool(torch.isfinite(loss)) else [f"the loss is {float(loss)}"]
    if not what and not culprits:
        what.append("the norm of the gradient is not finite")
    if culprits:
        what.append(f"the gradient of '{culprits[0]}'{and_more(len(culprits) - 1)} is not finite")
    shown = ", ".join(map(str, samples[:_SHOWN_SAMPLES].tolist()))
    rest = and_more(len(samples) - _SHOWN_SAMPLES)
    return f"Step {step + 1}: {' and '.join(what)}; its batch is samples {shown}{rest}"


# --- updates that the device leaves out by itself, as torch's fused kernels do for a GradScaler ---


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether the next update can be left out without the host, so that nothing of the optimizer changes.

    Not the first update of a parameter: its state would then be there, and torch's SGD takes what lies in memory for
    the momentum of the second one.
    """
    for one in parts_of(optimizer):
        if type(one) not in FUSED or not all(group.get("fused") for group in one.param_groups):
            return False
        has_state = not isinstance(one, SGD) or any(group["momentum"] for group in one.param_groups)
        for parameter in (parameter for group in one.param_groups for parameter in group["params"]):
            is_new = has_state and parameter.grad is not None and not one.state.get(parameter)
            if is_new or is_dtensor(parameter):  # torch's kernels take no shards of the flag
                return False
    return True


@contextmanager
def left_out_where(optimizer: Optimizer, is_bad: Tensor) -> Iterator[None]:
    """A context in which an optimizer that `skips_on_device` updates where `is_bad`, a float32 scalar, is 0, not 1."""
    for one in parts_of(optimizer):
        one.found_inf = is_bad  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for one in parts_of(optimizer):
            del one.found_inf  # type: ignore[attr-defined]


def spoil_gradients_where(optimizer: Optimizer, is_bad: Tensor) -> None:
    """Make a gradient NaN where `is_bad`, a scalar, is not 0: a GradScaler, which looks at gradients alone, then leaves
    the update out."""
    first = next(p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
    first.masked_fill_(is_bad != 0, torch.nan)
