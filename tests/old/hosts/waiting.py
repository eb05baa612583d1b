"""Takes steps with the others until somebody stops it, without torch: for what happens to nodes, agents and launchers.

    waiting.py STAGE

Workers wait for each other by files that all nodes see, so that a lost one leaves the others waiting, as if it had
fallen silent. Each leaves its pid in STAGE/RANK.pid, and STAGE/RANK.steps when it has done some steps.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from pathlib import Path

from paceline import env
from paceline.heartbeat import Heartbeat

STEPS_BEFORE = 5
LIMIT_S = 300.0


def main() -> None:
    stage, rank, world_size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    heartbeat_path = env.path(env.HEARTBEAT)
    assert heartbeat_path is not None
    heartbeat = Heartbeat(heartbeat_path)
    (stage / f"{rank}.pid").write_text(str(os.getpid()))
    began = time.monotonic()
    for step in itertools.count(1):
        heartbeat.enter("paceline", f"all_reduce number {step}")
        (stage / f"step{step}.{rank}").touch()
        while not all((stage / f"step{step}.{other}").exists() for other in range(world_size)):
            time.sleep(0.01)
            assert time.monotonic() - began < LIMIT_S
        heartbeat.leave("paceline")
        heartbeat.step(step)
        if step == STEPS_BEFORE:
            (stage / f"{rank}.steps").touch()


if __name__ == "__main__":
    main()
