"""What the tests' fork server loads, so that the processes which it forks need not."""

import contextlib
import ctypes
import gc
import importlib
import mmap
from pathlib import Path

_MODULES = (
    "torch._dynamo",  # an optimizer's first step would load it
    "torch.distributed.pipelining",  # and this, with the next, the cut of a model into stages
    "networkx",
    "torch.distributed.checkpoint",
    "pytest",
    "hypothesis",
    "paceline.train.loop",
    "paceline.parallel.spread_model",
    "paceline.cli",
    # libraries whose models and metrics many tests train
    "transformers.modeling_utils",
    "peft",
    "torchmetrics",
)
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25
"""From <asm-generic/mman-common.h>, Linux 6.1: make huge pages of memory that is in use."""


def _use_huge_pages() -> None:
    """Have fewer pages: to fork this process and to end its child takes as long as there are pages to count.

    Where the kernel has no huge pages to give, nothing changes.
    """
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, _, _, _, *name = line.split()
        first, end = (int(address, 16) for address in addresses.split("-"))
        first = -(-first // _HUGE_PAGE) * _HUGE_PAGE
        if access == "rw-p" and name in ([], ["[heap]"]) and first + _HUGE_PAGE <= end:
            advise(first, end - first, mmap.MADV_HUGEPAGE)
            for page in range(first, end - _HUGE_PAGE + 1, _HUGE_PAGE):  # one by one: each may be refused
                advise(page, _HUGE_PAGE, _MADV_COLLAPSE)


gc.disable()  # hardly anything that modules make is garbage
for _module in _MODULES:
    with contextlib.suppress(ImportError):  # an extra that is not installed
        importlib.import_module(_module)
gc.freeze()  # memory that the collector does not touch stays shared with the forked processes
gc.enable()
_use_huge_pages()
