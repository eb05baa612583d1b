"""The bits that `parity = "bitwise"` has given before, for each kind of processor that tests have run on.

`python -m tests.law.golden` writes those of this processor into tests/data/golden_bits.json.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import torch

from tests.kit.engines import ENGINES
from tests.kit.train import trained
from tests.law.tasks import TASKS

FILE = Path(__file__).parents[1] / "data" / "golden_bits.json"


def processor() -> str:
    """What bits follow from: the build of torch, and which of its kernels this processor runs."""
    facts = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines())
    vendor = next((value.strip() for name, _, value in facts if name.strip() == "vendor_id"), "unknown")
    return f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {vendor}"


def known() -> dict[str, str]:
    """The fingerprint of the weights, for each processor."""
    found: dict[str, str] = json.loads(FILE.read_text())
    return found


@cache
def bits_of_one_worker() -> str:
    (alone,) = trained(ENGINES["one worker"], TASKS["bits"], parity="bitwise", precision="float32")
    return alone.weights_sha256


if __name__ == "__main__":
    FILE.write_text(json.dumps(known() | {processor(): bits_of_one_worker()}, indent=1, sort_keys=True) + "\n")
