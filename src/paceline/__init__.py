"""Paceline: add devices, keep the accuracy, know the gain before you pay for it.

Every command of `paceline` is a function here: `paceline.train("mnist-lenet", workers=2)` is what
`paceline train mnist-lenet -n 2` runs. `paceline.init` is for a training loop of your own.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline import errors as errors

if TYPE_CHECKING:
    from paceline.parallel.losses import Mean as Mean
    from paceline.report.study import Study as Study
    from paceline.spec import Cluster as Cluster
    from paceline.spec import Job as Job
    from paceline.spec import Plan as Plan
    from paceline.spec import RunRecord as RunRecord
    from paceline.spec.forecast import Forecast as Forecast
    from paceline.train import Callback as Callback
    from paceline.train import Run as Run
    from paceline.train import init as init
    from paceline.workflows import checkpoint as checkpoint
    from paceline.workflows import submit as submit
    from paceline.workflows.catalog import catalog as catalog
    from paceline.workflows.machine import doctor as doctor
    from paceline.workflows.machine import topo as topo
    from paceline.workflows.plan import dry_run_mesh as dry_run_mesh
    from paceline.workflows.plan import plan as plan
    from paceline.workflows.plan import probe as probe
    from paceline.workflows.runs import launch as launch
    from paceline.workflows.runs import report as report
    from paceline.workflows.runs import scale as scale
    from paceline.workflows.runs import train as train
    from paceline.workflows.runs import watch as watch
    from paceline.workflows.verify import verify as verify
    from paceline.workflows.where import Where as Where

__version__ = "0.2.0"

_MODULES = {
    **dict.fromkeys(("Cluster", "Job", "Plan", "RunRecord"), "spec"),
    **dict.fromkeys(("Callback", "Run", "init"), "train"),
    **{name: f"workflows.{name}" for name in ("checkpoint", "submit", "verify")},
    **dict.fromkeys(("doctor", "topo"), "workflows.machine"),
    **dict.fromkeys(("dry_run_mesh", "plan", "probe"), "workflows.plan"),
    **dict.fromkeys(("launch", "report", "scale", "train", "watch"), "workflows.runs"),
    "catalog": "workflows.catalog",
    "Where": "workflows.where",
    "Forecast": "spec.forecast",
    "Mean": "parallel.losses",
    "Study": "report.study",
}
"""The modules of the public names, or which are public themselves; a module is loaded when one of its names is first
used, since torch takes seconds."""

__all__ = ["__version__", "errors", *_MODULES]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    module = importlib.import_module(f"paceline.{_MODULES[name]}")
    globals()[name] = getattr(module, name, module)
    return globals()[name]


def __dir__() -> list[str]:
    return __all__


class _PublicNamesStay(ModuleType):
    """`paceline.train` is the function even after the package `paceline.train` was imported.

    Python sets an imported submodule as an attribute of its package; where a public name stands, it does not here. The
    packages `checkpoint`, `launch`, `plan`, `report` and `train` are imported with `from paceline.train import …`.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if not (isinstance(value, ModuleType) and name in __all__):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _PublicNamesStay
