"""A run of `paceline launch` saves when it is asked to, and goes on after whatever ended it: by itself, or by the same
command again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import paceline
from tests.kit.markdown import ROOT
from tests.kit.stage import Stage, ended
from tests.kit.workers import run_ranks
from tests.resume.training import FIRST_SAVE, TIMEOUT_S, Undisturbed, first_steps, samples_seen, train

SCRIPT = """
sys.path.insert(0, {root!r})
from tests.resume.training import FIRST_SAVE, Kill, train

FOLDER = STAGE / "training"
FOLDER.mkdir(exist_ok=True)
"""

RESULT = """
outcome = train(FOLDER, ATTEMPT, kill=kill, after_step=after_step, every_steps=every_steps)
tell(f"{RANK}.weights", outcome.weights_sha256)
"""

AWAITS_A_SIGNAL = """
def after_step(run):
    "After step 2 all workers wait until each has got the signal; Paceline hears of it too."
    if run.steps != 2:
        return
    heard, handlers = threading.Event(), {{number: signal.getsignal(number) for number in {numbers}}}

    def hear(number, frame):
        heard.set()
        handlers[number](number, frame)

    for number in handlers:
        signal.signal(number, hear)
    tell(f"{{RANK}}.waits")
    heard.wait()
    for number, handler in handlers.items():
        signal.signal(number, handler)
"""


def script(stage: Stage, *parts: str) -> str:
    return stage.script(SCRIPT.format(root=str(ROOT)), *parts, RESULT)


def go_on(folder: Path, undisturbed: Undisturbed) -> int:
    """Finish the run; the step that it began with."""
    outcomes = run_ranks(train, 1, folder, 1, timeout_s=TIMEOUT_S)
    undisturbed.assert_equal(outcomes, folder)
    step = first_steps(folder)[1]
    assert f"resumed at step {step} from" in outcomes[0].said
    return step


@pytest.mark.budget(processor_s=25)
@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly)],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_run_that_is_asked_to_end_saves_its_last_step(
    stage: Stage, undisturbed: Undisturbed, number: signal.Signals, exit_code: int
) -> None:
    """Nothing else is saved. To its workers a launcher may pass Ctrl-C on as SIGTERM."""
    waits = AWAITS_A_SIGNAL.format(numbers=(int(signal.SIGTERM), int(number)))
    launcher = stage.launch(script(stage, "ATTEMPT, kill, every_steps = 0, None, 100", waits))
    stage.await_marks("0.waits", "1.waits")
    launcher.send_signal(number)
    end = ended(launcher)
    assert end.exit_code == exit_code, end
    folder = stage.folder / "training"
    assert [one.state for one in paceline.checkpoint.verify(folder / "checkpoints")] == ["good"]
    last_step = max(samples_seen(folder))
    assert go_on(folder, undisturbed) == last_step + 1


@pytest.mark.budget(processor_s=25)
def test_a_run_that_is_asked_to_save_goes_on(stage: Stage, undisturbed: Undisturbed) -> None:
    waits = AWAITS_A_SIGNAL.format(numbers=(int(signal.SIGUSR1),))
    kill = "Kill('between steps', FIRST_SAVE + 1, None)"  # not before there is a checkpoint
    launcher = stage.launch(script(stage, f"ATTEMPT, kill, every_steps = 0, {kill}, 100", waits))
    stage.await_marks("0.waits", "1.waits")
    launcher.send_signal(signal.SIGUSR1)
    assert ended(launcher).exit_code == 128 + signal.SIGKILL
    assert go_on(stage.folder / "training", undisturbed) in (2, 3)


@pytest.mark.budget(processor_s=25)
def test_a_run_whose_launcher_is_killed_goes_on(stage: Stage, undisturbed: Undisturbed) -> None:
    waits = """
        def after_step(run):
            if run.steps == 7:
                while not list(FOLDER.glob("checkpoints/step-*/manifest.json")):
                    time.sleep(0.01)
                tell(f"{RANK}.waits")
                park()
        """
    launcher = stage.launch(script(stage, "ATTEMPT, kill, every_steps = 0, None, FIRST_SAVE", waits))
    stage.await_marks("0.waits", "1.waits")
    launcher.kill()
    launcher.wait()
    stage.await_nobody()
    assert FIRST_SAVE <= go_on(stage.folder / "training", undisturbed) <= 7


@pytest.mark.budget(processor_s=45)
@pytest.mark.parametrize("launcher", ["paceline", pytest.param("torchrun", marks=pytest.mark.nightly)])
def test_a_run_whose_worker_is_killed_goes_on_by_itself(stage: Stage, undisturbed: Undisturbed, launcher: str) -> None:
    attempt = """
        ATTEMPT = int((FOLDER / "killed").exists())
        kill = None if ATTEMPT else Kill("in a step", 7, 1)
        after_step, every_steps = None, FIRST_SAVE
        """
    path = script(stage, attempt)
    if launcher == "paceline":
        end = ended(stage.launch(path, "--max-restarts", "1"))
        assert "Rank 1 of 2" in end.err and "restart 1" in end.err, end.err
    else:
        words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1")
        end = ended(stage.start("torch.distributed.run", *words, path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
    assert end.exit_code == 0, end
    folder = stage.folder / "training"
    assert FIRST_SAVE <= first_steps(folder)[1] <= 7
    weights = {(stage.folder / f"{rank}.weights").read_text() for rank in range(2)}
    assert weights == {undisturbed.outcome.weights_sha256}
    assert samples_seen(folder) == undisturbed.samples
