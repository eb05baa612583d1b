"""Tensor parallelism: the workers of one axis compute a slice each of every layer.

A plan says which module is shared how. `declared_plan` is what the user gives or the model carries, `find_plan` finds
one, and `apply_plan` applies it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from paceline.errors import ModelError
from paceline.parallel.tensor.apply import Applied, apply_plan
from paceline.parallel.tensor.divided_activations import begin_divided, counting_divided
from paceline.parallel.tensor.finder import find_plan
from paceline.parallel.tensor.plan import TensorPlan, given_plan, styles_of_model
from paceline.parallel.tensor.region_finder import add_sequence_regions
from paceline.parallel.tensor.traffic import bytes_per_sample, layer_sizes

__all__ = [
    "Applied",
    "TensorPlan",
    "begin_divided",
    "bytes_per_sample",
    "counting_divided",
    "declared_plan",
    "find_plan",
    "layer_sizes",
    "tensor_parallel",
]


def declared_plan(model: nn.Module, styles: Mapping[str, str] | None, degree: int) -> TensorPlan | None:
    """The plan that the user gives, or else the model carries; None: one has to be found.

    A plan that the model carries may be written for other workers than ours, which divide experts or wrapped layers:
    then one is found, with a note.

    Args:
        styles: by names of modules of the whole model, in which * stands for one part of a name; None: none given.

    Raises:
        ModelError: the model cannot be shared so by `degree` workers.
    """
    if styles is not None:
        return given_plan(model, styles, degree)
    carried = styles_of_model(model)
    if not carried:
        return None
    try:
        return given_plan(model, carried, degree)
    except ModelError as problem:
        found = find_plan(model, degree)
        return replace(found, notes=(*found.notes, f"The tensor plan that the model carries is not used: {problem}"))


def tensor_parallel(
    model: nn.Module,
    axis: DeviceMesh,
    *,
    given: TensorPlan | None = None,
    sequence_parallel: bool = False,
    applied: Applied | None = None,
) -> TensorPlan:
    """Shard the layers of a model, or of one stage of it, over the workers of `axis`; a collective of them.

    Args:
        given: the plan of a whole model, of which the modules of this stage are taken; None: one is found.
        sequence_parallel: as for `find_plan`.
        applied: what was applied to the worker's other stages; None: there are none.

    Returns:
        The plan that was applied.
    """
    if given is None:
        plan = find_plan(model, axis.size(), sequence_parallel=sequence_parallel)
    else:
        here = {name for name, _ in model.named_modules()}
        plan = replace(given, styles={name: style for name, style in given.styles.items() if name in here})
        for name, entry in plan.entries.items():
            for other in (*entry.get("same_input", ()), *entry.get("gather_channels", ())):
                if other not in here:
                    raise ModelError(
                        f"The tensor plan's '{name}' is shared together with '{other}', which is in another stage of "
                        "the pipeline; cut the model elsewhere (pipeline.cuts), or leave one of them out of the plan."
                    )
        if sequence_parallel and not any("sequence" in style for style in plan.styles.values()):
            plan = add_sequence_regions(model, plan)
    apply_plan(model, axis, plan, applied or Applied())
    return plan
