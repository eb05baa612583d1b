"""The command line of ssh, read back by a real shell, and sentences for its failures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import LaunchError
from paceline.launch.ssh import explain_ssh_failure, ssh_argv
from paceline.launch.variables import looks_secret, with_variables

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
SHOW = "import os, sys; print(ascii((os.getcwd(), os.environ.get('VALUE'), sys.argv[1:])))"


@settings(max_examples=30)
@given(st.lists(WORDS, max_size=4), WORDS)
def test_a_shell_reads_back_exactly_the_words(words: list[str], value: str) -> None:
    program = [sys.executable, "-S", "-c", SHOW, *words]
    command = ssh_argv("a", program, cwd=Path("/usr"), environ={"VALUE": value})[-1]
    shell = subprocess.run(["sh", "-c", command], capture_output=True, timeout=20, env={"LC_ALL": "C.UTF-8"})
    assert shell.stdout.decode().strip() == ascii(("/usr", value, words)), shell.stderr


def test_a_folder_of_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "-it's $HOME\n"
    folder.mkdir()
    command = ssh_argv("a", [sys.executable, "-S", "-c", SHOW], cwd=folder, environ={})[-1]
    shell = subprocess.run(["sh", "-c", command], capture_output=True, timeout=20)
    assert shell.stdout.decode().strip() == ascii((str(folder), None, [])), shell.stderr


def test_host_keys_are_checked_whatever_the_options_say() -> None:
    argv = ssh_argv("a", ["true"], cwd=Path("/"), environ={}, options=["-o", "StrictHostKeyChecking=no"])
    # ssh(1): "For each parameter, the first obtained value will be used."
    assert next(word for word in argv if word.startswith("StrictHostKeyChecking")).endswith("=yes")
    assert argv[-3:-1] == ("--", "a")
    assert "-tt" not in argv


@pytest.mark.parametrize("host", ["-oProxyCommand=x", "", "a\0b"])
def test_a_host_that_is_none(host: str) -> None:
    with pytest.raises(LaunchError, match="is not the name of a node"):
        ssh_argv(host, ["true"], cwd=Path("/"), environ={})


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD", "db_password", "MYAPIKEY", "SSH_KEYS", "KEY"],
)
def test_secrets_stay_off_command_lines(name: str) -> None:
    assert looks_secret(name)
    with pytest.raises(LaunchError, match=f"^{name} looks like a secret") as caught:
        ssh_argv("a", ["true"], cwd=Path("/"), environ={name: "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "KEYBOARD", "MONKEY", "PATH", "NCCL_SOCKET_IFNAME"])
def test_harmless_names(name: str) -> None:
    assert with_variables(["true"], {name: "1"}) == ("env", f"{name}=1", "true")


@pytest.mark.parametrize("name", ["", "A B", "1A", "-i", "A=B"])
def test_names_that_env_would_misread(name: str) -> None:
    with pytest.raises(LaunchError, match="cannot be set"):
        with_variables(["true"], {name: "1"})


@pytest.mark.parametrize(
    ("exit_code", "stderr", "words"),
    [
        (255, "ssh: Could not resolve hostname b: Name or service not known", "The name b is not known"),
        (255, "ssh: connect to host b port 22: Connection refused", "Nothing answers SSH on kim@b"),
        (255, "ssh: connect to host b port 22: No route to host", "cannot be reached"),
        (255, "ssh: connect to host b port 22: Connection timed out", "cannot be reached"),
        (255, "kex_exchange_identification: Connection closed by remote host", "hung up before the login"),
        (255, "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", "ssh-keygen -R b"),
        (255, "No ED25519 host key is known for b and …\nHost key verification failed.", "among the known hosts"),
        (255, "kim@b: Permission denied (publickey).", "ssh-copy-id kim@b"),
        (255, "Timeout, server b not responding.", "was lost"),
        (255, "Bad owner or permissions on /home/kim/.ssh/config", "Bad owner or permissions"),
        (255, "", "no reason given"),
        (2, "sh: 1: cd: can't cd to /data/run", "no such folder"),
        (1, "bash: line 1: cd: /data/run: No such file or directory", "no such folder"),
        (127, "env: '/opt/python': No such file or directory", "no such Python"),
        (126, "bash: line 1: /opt/python: Permission denied", "no program that your user may run"),
        (1, "/usr/bin/python3: No module named paceline", "has no Paceline"),
    ],
)
def test_failures_in_words(exit_code: int, stderr: str, words: str) -> None:
    sentence = explain_ssh_failure(exit_code, stderr, "kim@b")
    assert sentence is not None
    assert words in sentence
    assert sentence[0].isupper()
    assert "{" not in sentence


@pytest.mark.parametrize(
    ("exit_code", "stderr"), [(0, "cd: no such file or directory"), (1, "Permission denied"), (-9, "")]
)
def test_what_the_program_did_is_no_failure_of_ssh(exit_code: int, stderr: str) -> None:
    assert explain_ssh_failure(exit_code, stderr) is None
