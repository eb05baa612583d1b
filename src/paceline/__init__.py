"""Paceline: add devices, keep the accuracy, know the gain before you pay for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.spec import Job
    from paceline.train import Run, init

__version__ = "0.1.0"
__all__ = ["Job", "Run", "__version__", "init"]


def __getattr__(name: str) -> Any:
    # torch takes seconds to load, so `import paceline` waits with it until training is asked for.
    if name in ("Run", "init"):
        from paceline import train

        return getattr(train, name)
    if name == "Job":
        from paceline.spec import Job

        return Job
    raise AttributeError(f"module 'paceline' has no attribute '{name}'")
