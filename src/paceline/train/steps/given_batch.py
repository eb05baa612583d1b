"""What a script does to a batch between `run.batches` and `run.step`, as far as it shows there.

A worker has only its part of a batch. What is computed there over several samples, such as the partners of a mixup, is
of other samples on another number of workers; in the loss function samples are mixed within a virtual shard.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.containers import named_tensors, tensors, versions
from paceline.own_generators import RandomGenerator
from paceline.sharded_batch import ShardedBatch
from paceline.train.steps.batch_recording import BatchRecording, RowFinding
from paceline.train.steps.host_draws import HostDraws

_SENTENCES = {
    RowFinding.MIXES_SAMPLES: (
        "Between run.batches and run.step the script makes {0} of several samples of the batch, as by a permutation, "
        "flip(0) or a mean over all of them. A worker has only its part of the batch there, so the result depends on "
        "the number of workers. Do it in the loss function, which gets one virtual shard after the other where "
        "samples are mixed, in the data set or in collate_fn."
    ),
    RowFinding.SHARES_ROWS: (
        "Between run.batches and run.step the script draws random numbers of {1} rows, as many as a worker has "
        "samples, and each sample of {0} follows from several rows. Which numbers these are depends on the number of "
        "workers, because a tensor with a row for each sample is drawn for every virtual shard apart. Draw what all "
        "samples share in another shape, such as torch.rand(1, {1}), what is of one sample as its row, and compute "
        "over several samples in the loss function."
    ),
    RowFinding.DIVIDES_DRAWS: (
        "Between run.batches and run.step each sample of {0} gets other random numbers, of a tensor that has not one "
        "row for each sample ({2}). Such a tensor is the same on all workers, so which numbers a sample gets depends "
        "on the number of workers. Draw with a row for each sample, such as torch.rand(len(x), …), or in the loss "
        "function."
    ),
    RowFinding.FOLLOWS_PLACE: (
        "Between run.batches and run.step each sample of {0} follows from random numbers for all samples ({2}), and "
        "from something that is different for each, such as its place among those of a worker in "
        "torch.arange(len(x)). Places depend on the number of workers; in the loss function, which gets virtual "
        "shards, they do not."
    ),
}
"""{0}: the place of a tensor, {1}: the number of samples, {2}: what draws for all of them."""
_DRAWS_BY_HOST = (
    "Between run.batches and run.step the script draws as many random numbers by NumPy or Python as a worker has "
    "samples, or more, and changes the batch: if each sample gets numbers of its own, which ones they are depends on "
    "the number of workers. Draw them by torch with a row for each sample, such as torch.rand(len(x)), or in the loss "
    "function, the data set or collate_fn."
)
_WORDS_FOR_ALL = 12
"""Number of random words that a script may draw for values shared by all samples, such as the mixing ratio of mixup or
the box of CutMix."""


class GivenBatch:
    """A batch as the script got it, and what it has done to it since."""

    def __init__(self, content: Any, num_samples: int, *, is_recorded: bool = False) -> None:
        """
        Args:
            num_samples: the number of this worker's samples.
            is_recorded: whether to find out if the script mixes samples, until `stop`.
        """
        given = list(tensors(content))
        self._tensors = [weakref.ref(tensor) for tensor in given]
        self._versions = versions(given)
        self._num_samples = num_samples
        # Another mode of the script's may end before this one; and shards that were collated alone stay apart.
        is_recorded &= _get_current_dispatch_mode() is None and not isinstance(content, ShardedBatch)
        self.recording = BatchRecording(given) if is_recorded else None
        self._host_draws = HostDraws() if is_recorded else None

    def stop(self) -> None:
        """Look at nothing more that the script does."""
        if self.recording is not None:
            self.recording.stop()

    def finding(self, content: Any) -> tuple[str, bool]:
        """What is wrong with `content`, which the script gives to `run.step`: that a sample of it follows from others
        of this worker's batch, or from random numbers of others; empty if nothing is known to be. And whether that is
        certain."""
        if self.recording is None or self._host_draws is None:
            return "", False
        named = list(named_tensors(content, "batch")) if self.is_changed(content) else []
        findings = self.recording.found([tensor for _, tensor in named], self._num_samples)
        certain = possible = ""
        for (place, tensor), finding in zip(named, findings, strict=True):
            if finding is None:
                continue
            draws = self.recording.draws_for_all(tensor)
            sentence = _SENTENCES[finding].format(place, self._num_samples, draws)
            if finding is RowFinding.FOLLOWS_PLACE:
                possible = possible or sentence
            else:
                certain = certain or sentence
        self.recording.forget()
        if named and self._host_draws.are_many(max(self._num_samples, _WORDS_FOR_ALL)):
            possible = possible or _DRAWS_BY_HOST
        return certain or possible, bool(certain)

    @property
    def generators_of_host(self) -> list[RandomGenerator]:
        """The script's own generators of NumPy and Python that it has drawn from, as far as it is recorded."""
        return [] if self._host_draws is None else self._host_draws.from_own()

    def is_changed(self, content: Any) -> bool:
        """Whether `content`, which the script gives to `run.step`, is not what it got."""
        now = list(tensors(content))
        return not (
            len(now) == len(self._tensors)
            and all(before() is one for before, one in zip(self._tensors, now, strict=True))
            and versions(now) == self._versions
        )
