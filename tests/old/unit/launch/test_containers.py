"""Containers' command lines. Apptainer and Podman are played by scripts that record their arguments."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline.errors import LaunchError
from paceline.launch.containers import container_runtime, image_digest, in_container

DIGEST = "ab" * 32


def _here(argv: Sequence[str]) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=20).stdout


def test_apptainer() -> None:
    argv = in_container(["python", "-m", "x"], "image.sif", cwd=Path("/data"), binds=[Path("/runs"), Path("/data")])
    assert argv == (
        *("apptainer", "--silent", "exec", "--bind=/data:/data", "--bind=/runs:/runs", "--pwd=/data", "image.sif"),
        *("env", "PYTHONPATH=", "PYTHONHOME=", "PYTHONNOUSERSITE=1", "python", "-m", "x"),
    )
    assert "--nv" in in_container(["x"], "docker://a/b", cwd=Path("/"), gpus=True)
    assert "--cleanenv" not in argv


def test_podman() -> None:
    argv = in_container(["python"], "podman://a/b:1", cwd=Path("/data"))
    assert argv[:2] == ("podman", "run")
    assert {"--rm", "--interactive", "--network=host", "--volume=/data:/data", "--workdir=/data"} <= set(argv)
    assert argv[argv.index("a/b:1") :] == ("a/b:1", "env", "PYTHONPATH=", "PYTHONHOME=", "PYTHONNOUSERSITE=1", "python")
    assert not any("nvidia" in word for word in argv)
    assert "--device=nvidia.com/gpu=all" in in_container(["x"], "podman://a", cwd=Path("/"), gpus=True)
    # Nothing that a terminal would need or change.
    assert not {"-t", "--tty", "-it"} & set(argv)


@pytest.mark.parametrize(
    "image",
    ["", "a/b", "image.sqsh", "--nv.sif", "docker://", "docker://-x", "podman://", "podman://--privileged", "ftp://x"],
)
def test_images_that_are_none(image: str) -> None:
    with pytest.raises(LaunchError, match=r"should be image\.sif"):
        container_runtime(image)


@pytest.mark.parametrize("folder", ["/a:b", "/a,b", "relative", "/a\nb"])
def test_folders_that_cannot_be_shown(folder: str) -> None:
    with pytest.raises(LaunchError, match="cannot be shown to a container"):
        in_container(["x"], "image.sif", cwd=Path("/"), binds=[Path(folder)])


@pytest.mark.parametrize("image", ["image.sif", "podman://a/b:1"])
def test_a_stand_in_hears_every_word(image: str, tmp_path: Path) -> None:
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(f"#!{sys.executable} -S\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o700)
    _, *words = in_container(["x", 'it\'s "a" $word'], image, cwd=tmp_path)
    heard = subprocess.run([str(stand_in), *words], capture_output=True, text=True, check=True, timeout=20).stdout
    assert json.loads(heard) == words


@pytest.mark.parametrize("name", ["image.sif", "an image.sif", "back\\slash.sif"])
def test_the_digest_of_a_file(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"an image")
    expected = "sha256:" + hashlib.sha256(b"an image").hexdigest()
    assert image_digest(str(tmp_path / name), _here) == expected
    (tmp_path / name).write_bytes(b"another image")
    assert image_digest(str(tmp_path / name), _here) != expected


def test_digests_by_name() -> None:
    asked: list[Sequence[str]] = []

    def podman(argv: Sequence[str]) -> str:
        asked.append(argv)
        return f"sha256:{DIGEST}\n"

    assert image_digest("podman://a/b:1", podman) == f"sha256:{DIGEST}"
    assert asked == [("podman", "image", "inspect", "--format={{.Digest}}", "a/b:1")]
    assert image_digest(f"docker://a/b@sha256:{DIGEST}", podman) == f"sha256:{DIGEST}"
    with pytest.raises(LaunchError, match="may be another image on every node"):
        image_digest("docker://a/b:latest", podman)
    with pytest.raises(LaunchError, match="does not say the digest"):
        image_digest("podman://a/b:1", lambda _argv: "<none>\n")
