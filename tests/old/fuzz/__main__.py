"""`python -m tests.old.fuzz --seconds 600`: inputs for every reader and option, for so long."""

from __future__ import annotations

import argparse
import sys
import time

from tests.old.fuzz.engine import run
from tests.old.fuzz.targets import TARGETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--only", default="", help="targets whose names begin so")
    arguments = parser.parse_args()
    number = int(time.time()) if arguments.seed is None else arguments.seed
    targets = [target for target in TARGETS if target.name.startswith(arguments.only)]
    findings = run(targets, arguments.seconds, number)
    print(f"seed {number}: {findings.text()}")
    sys.exit(0 if findings.are_none else 1)


if __name__ == "__main__":
    main()
