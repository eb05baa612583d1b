"""`paceline submit`: a run for later, handed to a scheduler: a Slurm job script, or Kubernetes manifests."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

import paceline
from paceline.cli.options import DryRun, keys_of, options_of, split_settings
from paceline.workflows import submit as workflow

app = typer.Typer(no_args_is_help=True, help="Hand a run to Slurm or Kubernetes.")

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command("slurm", context_settings={**CONTEXT, "allow_interspersed_args": False})
@options_of(workflow.slurm)
def slurm(context: typer.Context, dry_run: DryRun = False, **options: Any) -> None:
    """Write a job script that runs `paceline COMMAND …` on the nodes of an allocation, and submit it."""
    command = options["command"]
    if command in workflow.COMMANDS:
        given = _parsed([command, *context.args])
        settings, chosen = split_settings(given.get("settings") or (), keys_of(getattr(paceline, command)))
        workflow.check_command(command, {**given, "settings": settings, **chosen})
    job = workflow.slurm(arguments=context.args, dry_run=dry_run, **options)
    if dry_run:
        print(job.script, end="")
        return
    log = f"{job.run_dir}/slurm-{job.job_id}.log"
    print(f"Slurm job {job.job_id}; its output goes to {log}. scancel {job.job_id} ends it.")


def _parsed(words: list[str]) -> dict[str, Any]:
    """The options of a command line, read as the command itself reads them; raises what that raises."""
    from paceline.cli import command_line  # which loads this module

    context = get_command(command_line(words[:1])).make_context("paceline", list(words))
    while isinstance(group := context.command, TyperGroup):
        name, command, words = group.resolve_command(context, words)
        assert command is not None
        context = command.make_context(name, list(words), parent=context)
    return context.params


@app.command("kubernetes", context_settings=CONTEXT)
@options_of(workflow.kubernetes, job={"metavar": "JOB|SCRIPT.py"})
def kubernetes(context: typer.Context, **options: Any) -> None:
    """Print manifests for `kubectl apply -f -`: one pod a node, PyTorch's elastic agent in each."""
    print(workflow.kubernetes(arguments=context.args, **options), end="")
