"""The shim alone: a program under it sees what it would see under python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.launch.failures import Failure

LOOK_AROUND = """
import json, sys
import neighbour
main = sys.modules["__main__"]
print(json.dumps([sys.argv, sys.path[0], __name__, __file__, main.__file__, neighbour.__file__]))
"""


def run(*command: str, cwd: Path, run_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`python command` in the folder `cwd`."""
    environ = {**os.environ, "PACELINE_RUN_DIR": str(run_dir) if run_dir else ""}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=30,
    )


def shim(*program: str, cwd: Path, run_dir: Path | None = None) -> subprocess.CompletedProcess[str]:
    return run("-m", "paceline.launch.worker", *program, cwd=cwd, run_dir=run_dir)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "neighbour.py").touch()
    (tmp_path / "code" / "look.py").write_text(LOOK_AROUND)
    (tmp_path / "link.py").symlink_to("code/look.py")
    return tmp_path


@pytest.mark.parametrize("command", [("code/look.py", "--flag", "-m"), ("link.py",)])
def test_a_script_sees_what_python_would_show_it(program: Path, command: tuple[str, ...]) -> None:
    expected = run(*command, cwd=program)
    assert expected.returncode == 0, expected.stderr
    assert json.loads(shim(*command, cwd=program).stdout) == json.loads(expected.stdout)


def test_a_module_sees_what_python_would_show_it(program: Path) -> None:
    command = ("-m", "look", "--flag", "value")
    expected = run(*command, cwd=program / "code")
    assert expected.returncode == 0, expected.stderr
    assert json.loads(shim(*command, cwd=program / "code").stdout) == json.loads(expected.stdout)


def test_classes_of_the_script_cross_to_spawned_children(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import atexit, multiprocessing, pickle

class Sample:
    value = 7

def value_of(sample):
    return sample.value

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.map(value_of, [Sample()]))
    atexit.register(lambda: print(type(pickle.loads(pickle.dumps(Sample()))).__name__))
""")
    done = shim("program.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("[7]\nSample\n", "")


@pytest.mark.parametrize(
    ("body", "exit_code"),
    [
        ("", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(5)", 5),
        ("import sys; sys.exit('what went wrong')", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError", 1),
        ("from paceline.errors import JobError; raise JobError('no such key')", 2),
        ("import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", 143),
    ],
)
def test_exit_codes(tmp_path: Path, body: str, exit_code: int) -> None:
    (tmp_path / "program.py").write_text(body)
    assert shim("program.py", cwd=tmp_path, run_dir=tmp_path / "run").returncode == exit_code


def test_an_exception_leaves_a_note_and_no_noise(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('so far')\nint('x')\n")
    done = shim("program.py", cwd=tmp_path, run_dir=tmp_path / "run")
    assert (done.stdout, done.stderr) == ("so far\n", "")
    note = Failure.read(tmp_path / "run" / "failures" / "rank0.json")
    assert note is not None and note.type == "ValueError" and not note.is_user_error
    assert note.traceback.splitlines()[1] == f'  File "{tmp_path / "program.py"}", line 2, in <module>'


def test_a_broken_script_shows_its_broken_line_alone(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("def (\n")
    shim("program.py", cwd=tmp_path, run_dir=tmp_path / "run")
    note = Failure.read(tmp_path / "run" / "failures" / "rank0.json")
    assert note is not None and note.type == "SyntaxError"
    assert note.traceback.startswith(f'  File "{tmp_path / "program.py"}", line 1')


def test_without_a_run_folder_the_traceback_is_printed(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("int('x')\n")
    done = shim("program.py", cwd=tmp_path)
    assert done.stderr.startswith("Traceback") and "runpy" not in done.stderr


def test_a_forked_child_dies_of_sigterm_as_children_do(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("""
import multiprocessing, time
for _ in range(20):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(20,))
    child.start()
    child.terminate()  # most of them before they are told anything
    child.join()
    print(child.exitcode)
""")
    assert shim("program.py", cwd=tmp_path).stdout.split() == 20 * [str(-signal.SIGTERM)]


def test_a_worker_whose_launcher_is_gone_does_not_begin(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('began')")
    read_end, write_end = os.pipe()
    os.close(write_end)
    with os.fdopen(read_end, "rb") as lifeline:
        done = subprocess.run(
            [sys.executable, "-m", "paceline.launch.worker", "program.py"],
            cwd=tmp_path,
            stdin=lifeline,
            capture_output=True,
            timeout=30,
        )
    assert (done.returncode, done.stdout) == (128 + signal.SIGKILL, b"")
