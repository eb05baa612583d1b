"""What the tests' fork server loads, so that the processes which it forks need not."""

import contextlib
import gc
import importlib

_MODULES = (
    "torch._dynamo",  # an optimizer's first step would load it
    "torch.distributed.checkpoint",
    "pytest",
    "paceline.train.loop",
    "paceline.parallel.engines.mesh",
    "paceline.parallel.engines.bitwise_mesh",
    "paceline.cli",
    "tests.ranks.training",
    # libraries whose models and metrics many tests train
    "transformers.modeling_utils",
    "peft",
    "torchmetrics",
)

gc.disable()  # hardly anything that modules make is garbage
for _module in _MODULES:
    with contextlib.suppress(ImportError):  # an extra that is not installed
        importlib.import_module(_module)
gc.freeze()  # memory that the collector does not touch stays shared with the forked processes
gc.enable()
