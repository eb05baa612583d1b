"""Models that cannot be trained: layers without weights yet, and those of torch whose options make a result depend on
which samples a worker has."""

from __future__ import annotations

from torch import nn
from torch.nn.parameter import is_lazy

from paceline.errors import ModelError
from paceline.spec import Job, Plan


def check_lazy_layers(model: nn.Module) -> None:
    """Refuse layers whose parameters have no shape yet.

    Raises:
        ModelError: there is one.
    """
    for name, parameter in model.named_parameters():
        if is_lazy(parameter):
            raise ModelError(
                f"The parameter '{name}' has no shape yet: its layer is a lazy one; call the model with some samples "
                "before run.prepare, and build the optimizer after that."
            )


def check_layers(model: nn.Module, job: Job, plan: Plan, *, is_alone: bool) -> None:
    """Refuse what would train otherwise on another number of workers: embeddings that change their rows in a forward
    pass or make sparse gradients, and complex parameters where gradients are sent and added as real numbers.

    Args:
        is_alone: whether one worker with one device trains the model.

    Raises:
        ModelError: there is one.
    """
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
        if layer.sparse and (job.parity == "bitwise" or not is_alone):
            where = "in bitwise parity" if is_alone else "on several workers"
            raise ModelError(
                f"{place} makes sparse gradients, which cannot be added up {where}; build it with sparse=False, which "
                "torch.optim.SGD and Adagrad take as well, and torch.optim.Adam in place of SparseAdam."
            )
    is_plain = (plan.mesh is None or plan.mesh.is_plain) and plan.devices_in_process == 1
    adds_complex = is_plain and job.parity == "numeric" and job.aggregation.method == "every_step"
    for name, parameter in model.named_parameters():
        if parameter.is_complex() and parameter.requires_grad and not adds_complex:
            raise ModelError(
                f"The parameter '{name}' has complex numbers, which train with the strategy dp, parity = 'numeric' and "
                "aggregation.method = 'every_step' alone; elsewhere hold its real and imaginary parts in a parameter "
                "and compute with torch.view_as_complex(parameter)."
            )
