"""What a script does to a batch between `run.batches` and `run.step`, as far as it shows there.

A worker has only its part of a batch. What is computed there over several samples, such as the partners of a mixup, is
of other samples on another number of workers; in the loss function samples are mixed within a virtual shard.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils._python_dispatch import _get_current_dispatch_mode

from paceline.containers import named_tensors, tensors, versions
from paceline.sharded_batch import ShardedBatch
from paceline.train.steps.batch_recording import BatchRecording, Finding

DRAWS_UNSEEN = (
    "Between run.batches and run.step the script draws random numbers in a function that is not looked into, such as a "
    "compiled or scripted one, and changes the batch: where each sample has numbers of its own, which ones it gets "
    "depends on the number of workers. Draw in the loss function, where every virtual shard has its own, or in the "
    "data set."
)
DRAWS_APART = (
    "Between run.batches and run.step the script draws random numbers for virtual shards that were collated apart: "
    "which ones a shard gets depends on the number of workers. Draw in a function given to batch.map, where every "
    "shard has its own, in the loss function or in the data set."
)
DRAWS_EACH = (
    "Between run.batches and run.step the script draws as often as a worker has samples, and changes the batch: if it "
    "draws once for each sample, which numbers a sample gets depends on the number of workers. Draw all at once, with "
    "a row for each sample, such as torch.rand(len(x)), or in the loss function."
)
GENERATOR_UNSAVED = (
    "Between run.batches and run.step the script draws from a generator of its own that no checkpoint holds: a run "
    "that resumes begins with its first numbers again. Give it to run.keep(name, generator)."
)
DRAWS_SINGLE = (
    "Between run.batches and run.step the script draws a tensor of a single number where a worker has a single sample: "
    "it is taken for this sample's own. Draw a number that all samples share without dimensions, as by torch.rand(())."
)
SHARES_ROWS = (
    "Between run.batches and run.step the script draws random numbers of {1} rows, as many as a worker has samples, "
    "and each sample of {0} follows from several rows. Which numbers these are depends on the number of workers, "
    "because a tensor with a row for each sample is drawn for every virtual shard apart. Draw what all samples share "
    "in another shape, such as torch.rand(1, {1}), what is of one sample as its row, and compute over several samples "
    "in the loss function."
)
DIVIDES_DRAWS = (
    "Between run.batches and run.step each sample of {0} gets other random numbers, of a tensor that has not one row "
    "for each sample ({2}). Such a tensor is the same on all workers, so which numbers a sample gets depends on the "
    "number of workers. Draw with a row for each sample, such as torch.rand(len(x), …), or in the loss function."
)
FOLLOWS_PLACE = (
    "Between run.batches and run.step each sample of {0} follows from random numbers for all samples ({2}), and from "
    "something that is different for each, such as its place among those of a worker in torch.arange(len(x)). Places "
    "depend on the number of workers; in the loss function, which gets virtual shards, they do not."
)
MIXES_SAMPLES = (
    "Between run.batches and run.step the script makes {} of several samples of the batch, as by a permutation, "
    "flip(0) or a mean over all of them. A worker has only its part of the batch there, so the result depends on the "
    "number of workers. Do it in the loss function, which gets one virtual shard after the other where samples are "
    "mixed, in the data set or in collate_fn."
)


_SENTENCES = {
    Finding.MIXES_SAMPLES: MIXES_SAMPLES,
    Finding.SHARES_ROWS: SHARES_ROWS,
    Finding.DIVIDES_DRAWS: DIVIDES_DRAWS,
    Finding.FOLLOWS_PLACE: FOLLOWS_PLACE,
}


class GivenBatch:
    """A batch as the script got it, and what it has done to it since."""

    def __init__(self, content: Any, num_samples: int, *, is_recorded: bool = False) -> None:
        """
        Args:
            num_samples: this worker's.
            is_recorded: whether to find out if the script mixes samples, until `stop`.
        """
        given = list(tensors(content))
        self._tensors = [weakref.ref(tensor) for tensor in given]
        self._versions = versions(given)
        self._num_samples = num_samples
        # Another mode of the script's may end before this one; and shards that were collated alone stay apart.
        is_recorded &= _get_current_dispatch_mode() is None and not isinstance(content, ShardedBatch)
        self.recording = BatchRecording(given) if is_recorded else None

    def stop(self) -> None:
        """Look at nothing more that the script does."""
        if self.recording is not None:
            self.recording.stop()

    def finding(self, content: Any) -> tuple[str, bool]:
        """What is wrong with `content`, which the script gives to `run.step`: that a sample of it follows from others
        of this worker's batch, or from random numbers of others; empty if nothing is known to be. And whether that is
        certain."""
        if self.recording is None:
            return "", False
        named = list(named_tensors(content, "batch")) if self.is_changed(content) else []
        findings = self.recording.found([tensor for _, tensor in named], self._num_samples)
        certain = possible = ""
        for (place, tensor), finding in zip(named, findings, strict=True):
            if finding is None:
                continue
            draws = self.recording.draws_for_all(tensor)
            sentence = _SENTENCES[finding].format(place, self._num_samples, draws)
            if finding is Finding.FOLLOWS_PLACE:
                possible = possible or sentence
            else:
                certain = certain or sentence
        self.recording.forget()
        return certain or possible, bool(certain)

    def is_changed(self, content: Any) -> bool:
        """Whether `content`, which the script gives to `run.step`, is not what it got."""
        now = list(tensors(content))
        return not (
            len(now) == len(self._tensors)
            and all(before() is one for before, one in zip(self._tensors, now, strict=True))
            and versions(now) == self._versions
        )
