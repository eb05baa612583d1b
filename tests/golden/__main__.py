"""`python -m tests.golden` shows what commands say otherwise than recorded; `--record` makes that the record."""

from __future__ import annotations

import argparse
import difflib
import sys

from tests.golden.outputs import OUTPUTS, are_same, outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="write what differs")
    is_recording = parser.parse_args().record
    found = outputs()
    different = 0
    for name, text in found.items():
        path = OUTPUTS / f"{name}.txt"
        recorded = path.read_text() if path.exists() else ""
        if not are_same(name, text, recorded):
            different += 1
            sys.stdout.writelines(
                difflib.unified_diff(recorded.splitlines(True), text.splitlines(True), f"{name}, recorded", "now")
            )
            if is_recording:
                path.write_text(text)
    for path in OUTPUTS.glob("*.txt"):
        if path.stem not in found:
            print(f"{path.name}: there is no such command")
            if is_recording:
                path.unlink()
    print(f"{len(found) - different} of {len(found)} as recorded")


if __name__ == "__main__":
    main()
