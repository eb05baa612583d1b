"""`paceline export`: the weights of a checkpoint as a file that everybody can read."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.errors import CheckpointError


def export(
    checkpoint: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint; or a run folder, whose newest good one is meant.")
    ],
    target: Annotated[str, typer.Argument(metavar="FILE", help="Such as model.safetensors.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if there is one.")] = False,
) -> None:
    """Write the model of a checkpoint into one safetensors file, under plain state_dict names."""
    from paceline.checkpoint import newest_good, read_checkpoint
    from paceline.checkpoint.place import find_place, split_address, storage_problems
    from paceline.checkpoint.storage import open_storage
    from paceline.checkpoint.weights import export_weights

    folder, file = split_address(target)
    with storage_problems(target):
        beside = open_storage(folder)
        if not force and file in beside.names():
            raise CheckpointError(f"{target} is there already; choose another name, or replace it with --force.")
    with storage_problems(checkpoint):
        place = find_place(checkpoint)
        if place.name is None:
            found, problems = newest_good(place.storage)
            for problem in problems:
                typer.echo(problem, err=True)
            if found is None:
                raise CheckpointError(f"There is no checkpoint in {place.storage.address}.")
        else:
            try:
                found = read_checkpoint(place.storage, place.name)
            except CheckpointError as problem:
                raise CheckpointError(f"The checkpoint {checkpoint} cannot be used: {problem}.") from None
    with storage_problems(target, "written"):
        export_weights(found.weights, beside, file)
    print(f"{target}: the model at step {found.manifest.step:,}, from {found.name} in {place.storage.address}")
