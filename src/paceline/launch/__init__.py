"""From a plan to processes: workers here or on several nodes, watched until all of them have ended."""

from __future__ import annotations

from paceline.launch.commands import WorkerCommand, worker_commands
from paceline.launch.run_workers import run_workers
from paceline.launch.team import LaunchOptions

__all__ = ["LaunchOptions", "WorkerCommand", "run_workers", "worker_commands"]
