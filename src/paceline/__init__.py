"""Paceline: add devices, keep the accuracy, know the gain before you pay for it.

Every command of `paceline` is a function here: `paceline.train("mnist-lenet", workers=2)` is what
`paceline train mnist-lenet -n 2` runs. `paceline.init` is for a training loop of your own.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from paceline import errors

if TYPE_CHECKING:
    from paceline.parallel.losses import Mean
    from paceline.report.study import Study
    from paceline.spec import Cluster, Job, Plan, RunRecord
    from paceline.spec.forecast import Forecast
    from paceline.train import Callback, Run, init
    from paceline.workflows import catalog, checkpoint, submit
    from paceline.workflows.doctor import doctor
    from paceline.workflows.launch import launch
    from paceline.workflows.mesh_dry_run import dry_run_mesh
    from paceline.workflows.plan import plan
    from paceline.workflows.probe import probe
    from paceline.workflows.report import report
    from paceline.workflows.scale import scale
    from paceline.workflows.strategy import Strategy
    from paceline.workflows.topo import topo
    from paceline.workflows.train import train
    from paceline.workflows.verify import verify
    from paceline.workflows.watch import watch
    from paceline.workflows.where import Where

__version__ = "0.2.0"
__all__ = [
    "Callback",
    "Cluster",
    "Forecast",
    "Job",
    "Mean",
    "Plan",
    "Run",
    "RunRecord",
    "Strategy",
    "Study",
    "Where",
    "__version__",
    "catalog",
    "checkpoint",
    "doctor",
    "dry_run_mesh",
    "errors",
    "init",
    "launch",
    "plan",
    "probe",
    "report",
    "scale",
    "submit",
    "topo",
    "train",
    "verify",
    "watch",
]

_MODULES = {
    **dict.fromkeys(("Cluster", "Job", "Plan", "RunRecord"), "paceline.spec"),
    **dict.fromkeys(("Callback", "Run", "init"), "paceline.train"),
    "Where": "paceline.workflows.where",
    "Forecast": "paceline.spec.forecast",
    "Mean": "paceline.parallel.losses",
    "Strategy": "paceline.workflows.strategy",
    "Study": "paceline.report.study",
    "dry_run_mesh": "paceline.workflows.mesh_dry_run",
}
"""The modules of the public names that are no commands; a module is loaded when one of its names is first used, since
torch takes seconds."""
_GROUPS = ("catalog", "checkpoint", "submit")
"""The public modules, each a group of functions: those of `paceline.workflows` with these names."""


def __getattr__(name: str) -> Any:
    if name in _GROUPS:
        value: Any = importlib.import_module(f"paceline.workflows.{name}")
    elif name in __all__:  # a command is a function in the module of its name
        value = getattr(importlib.import_module(_MODULES.get(name, f"paceline.workflows.{name}")), name)
    else:
        raise AttributeError(f"module 'paceline' has no attribute '{name}'")
    globals()[name] = value
    return value


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
