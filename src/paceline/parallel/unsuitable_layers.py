"""Models that cannot be trained: layers without weights yet, and those of torch whose options make a result depend on
which samples a worker has."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import ModelError
from paceline.spec import Job


def check_layers(model: nn.Module, job: Job, *, is_alone: bool) -> None:
    """Refuse lazy layers, and embeddings that would train otherwise on another number of workers.

    Args:
        is_alone: whether one worker with one device trains the model.

    Raises:
        ModelError: there is one.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"The parameter '{name}' has no shape yet: its layer is a lazy one; call the model with some samples "
                "before run.prepare, and build the optimizer after that."
            )
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            continue
        place = f"The layer '{name}'" if name else "The model"
        if layer.max_norm is not None:
            raise ModelError(
                f"{place} has max_norm, by which every forward pass shortens the rows that it looks up, on each worker "
                "those of its own samples; build it without, and shorten the rows after run.step "
                "(weight.renorm_(2, 0, max_norm))."
            )
        if layer.scale_grad_by_freq and job.parity != "bitwise" and not job.shard_by_shard:
            raise ModelError(
                f"{place} has scale_grad_by_freq, which counts words in all samples that go through the model "
                "together, and these differ with the number of workers; set shard_by_shard = true, which counts those "
                "of each virtual shard, or build it without."
            )
        if layer.sparse and (job.parity == "bitwise" or not is_alone):
            where = "in bitwise parity" if is_alone else "on several workers"
            raise ModelError(
                f"{place} makes sparse gradients, which cannot be added up {where}; build it with sparse=False, and "
                "take torch.optim.Adam in place of SparseAdam."
            )
