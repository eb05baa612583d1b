"""What is handed to Slurm, Kubernetes, Ray, Apptainer and Podman: scripts, manifests and command lines that say
what was asked, hold up to the schedulers' own schemas, keep every word whole, and never hold a secret."""

from __future__ import annotations

import copy
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.run
import yaml

import paceline
from paceline.errors import JobError, LaunchError
from paceline.launch.command_lines import container_argv, srun_argv

# --- Slurm ---


def slurm_script(*arguments: str, **options: Any) -> str:
    settings = {"nodes": 2, "workers": 8, "cpus": 12, "out": "/data/runs/1", "dry_run": True, **options}
    return paceline.submit.slurm("launch", ["train.py", *arguments], **settings).script


def sbatch_options(script: str) -> dict[str, str]:
    lines = [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]
    return {name: value for name, _, value in (line.partition("=") for line in lines)}


def test_a_slurm_script_asks_for_what_was_given() -> None:
    script = slurm_script()
    assert script.startswith("#!/bin/sh\n")
    options = sbatch_options(script)
    assert (options["nodes"], options["gpus-per-node"]) == ("2", "8")
    assert int(options["ntasks-per-node"]) * int(options["cpus-per-task"]) == 96
    assert "/data/runs/1/" in options["output"] and "%j" in options["output"]
    assert subprocess.run(["sh", "-n", "-c", script], timeout=60).returncode == 0
    bare = sbatch_options(slurm_script(on_cpu=True))
    assert not {"gpus-per-node", "time", "partition", "account"} & bare.keys()  # these are sbatch's variables


def test_a_slurm_script_quotes_every_argument() -> None:
    words = ["it's", "--flag=a b", "$HOME", "`reboot`", "a\nb", '"', "ä"]
    assert subprocess.run(["sh", "-n", "-c", slurm_script(*words)], timeout=60).returncode == 0
    beginning = slurm_script(*words).partition("\nrun=$!")[0]
    assert set(words) <= set(shlex.split(beginning, comments=True))


def test_a_slurm_job_saves_before_its_limit_and_goes_on() -> None:
    options = sbatch_options(slurm_script())
    assert "requeue" in options and options["signal"].startswith("B:USR2@")
    assert "scontrol requeue" in slurm_script()


@pytest.mark.parametrize("out", ['/data/"x', "/data/a\nb"])
def test_a_folder_that_would_add_an_option_of_sbatch_is_refused(out: str) -> None:
    with pytest.raises(LaunchError):
        slurm_script(out=out)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [("plan", {}, ["plan", "train"]), ("launch", {"nodes": 0}, ["nodes"]), ("launch", {"workers": -1}, ["workers"])],
)
def test_an_invalid_submission_is_refused(command: str, options: dict[str, int], words: list[str]) -> None:
    with pytest.raises((LaunchError, JobError)) as caught:
        paceline.submit.slurm(command, ["train.py"], dry_run=True, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), caught.value


def test_sbatch_gets_the_script_and_its_answer_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "sbatch"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LaunchError, match="sbatch"):
        slurm_script(dry_run=False, out=tmp_path / "none")
    sbatch.write_text(f"#!/bin/sh\ncat > {tmp_path}/heard\necho '18;other'\n")
    sbatch.chmod(0o700)
    job = paceline.submit.slurm("launch", ["train.py"], out=tmp_path / "run")
    assert job.job_id == "18"
    assert (tmp_path / "heard").read_text() == job.script == (tmp_path / "run" / "submit.sh").read_text()
    sbatch.write_text("#!/bin/sh\ncat > /dev/null\necho 'sbatch: error: no such partition' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="no such partition"):
        slurm_script(dry_run=False, out=tmp_path / "refused")


# --- Ray ---


def test_ray_gets_the_command_in_this_folder_and_its_answer_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = tmp_path / "ray"
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(LaunchError, match="ray"):
        paceline.submit.ray("launch", ["train.py"], out=tmp_path / "none")
    client.write_text(f"#!/bin/sh\nprintf '%s\\n' \"$@\" > {tmp_path}/heard\necho \"Job 'raysubmit_a1B' submitted\"\n")
    client.chmod(0o700)
    job = paceline.submit.ray("launch", ["train.py", "a b"], address="http://head:8265", out=tmp_path / "run")
    assert job.job_id == "raysubmit_a1B" and "raysubmit_a1B" in job.advice
    words = (tmp_path / "heard").read_text().splitlines()
    assert words[:6] == ["job", "submit", "--no-wait", "--address", "http://head:8265", "--"]
    assert shlex.split(job.script) == ["ray", *words]
    (command,) = words[8:]
    there = ["cd", "--", str(Path.cwd()), "&&", "exec", sys.executable, "-m", "paceline", "launch"]
    assert words[6:8] == ["sh", "-c"] and shlex.split(command)[:9] == there
    assert shlex.split(command)[9:] == ["--launcher", "ray", "--out", str(tmp_path / "run"), "train.py", "a b"]
    client.write_text("#!/bin/sh\necho 'ConnectionError: no head at 8265' >&2\nexit 1\n")
    with pytest.raises(LaunchError, match="no head at 8265"):
        paceline.submit.ray("train", ["digits-lenet"], out=tmp_path / "refused")


# --- Kubernetes ---


def manifest(kind: str = "job", **options: Any) -> str:
    settings = {
        "image": "registry.example/train@sha256:" + "ab" * 32,
        "claim": "runs",
        "out": "/data/runs/1",
        "nodes": 2,
        "workers": 8,
        "cpus": 12,
        "memory_gib": 500,
        "name": "run-1",
        **options,
    }
    arguments = settings.pop("arguments", ["--note", "$(HOME): yes"])
    return paceline.submit.kubernetes("/code/train.py", arguments, kind=kind, **settings)  # type: ignore[arg-type]


BARE: dict[str, Any] = {"on_cpu": True, "memory_gib": None}


@pytest.mark.parametrize("options", [{}, BARE, {"nodes": 1, "workers": 1}], ids=["full", "bare", "one"])
def test_a_job_is_what_the_strict_schema_of_kubernetes_knows(options: dict[str, Any]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    for document in yaml.safe_load_all(manifest(**options)):
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.parametrize("options", [{}, BARE], ids=["full", "bare"])
def test_a_train_job_is_what_kubeflow_knows(options: dict[str, Any]) -> None:
    """Its models drop what they do not know without a word."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    document = yaml.safe_load(manifest("trainjob", **options))
    assert models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document)).to_dict() == document


def test_a_job_says_what_was_asked() -> None:
    documents = {one["kind"]: one for one in yaml.safe_load_all(manifest())}
    service, job = documents["Service"], documents["Job"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    assert (job["spec"]["completionMode"], job["spec"]["completions"], job["spec"]["parallelism"]) == ("Indexed", 2, 2)
    pod = job["spec"]["template"]["spec"]
    assert pod["subdomain"] == service["metadata"]["name"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["resources"]["requests"]["cpu"] == "96"
    assert container["resources"]["limits"]["memory"] == "512000Mi"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert any(mount["mountPath"] == "/data" for mount in container["volumeMounts"])
    assert container["securityContext"]["allowPrivilegeEscalation"] is False
    for text in (manifest(**BARE), manifest("trainjob", **BARE)):
        assert "nvidia" not in text


def test_torchrun_understands_the_pods_command() -> None:
    job = next(one for one in yaml.safe_load_all(manifest()) if one["kind"] == "Job")
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[-2:] == ["--note", "$$(HOME): yes"]  # as Kubernetes wants a dollar that is one
    agent = next(place for place, word in enumerate(command) if word == "paceline.launch.agent")
    options = torch.distributed.run.get_args_parser().parse_args(command[agent + 1 :])
    assert (options.nnodes, options.nproc_per_node) == ("2", "8")
    assert "/code/train.py" in [options.training_script, *options.training_script_args]


def test_a_named_job_travels_whole_and_is_checked_first() -> None:
    options = {"image": "i", "claim": "c", "out": "/data/run", "workers": 2, "on_cpu": True}
    text = paceline.submit.kubernetes("digits-lenet", settings=["epochs=7"], **options)  # type: ignore[arg-type]
    assert '"epochs": 7' in text.replace('\\"', '"')
    with pytest.raises(JobError, match="virtual"):
        paceline.submit.kubernetes("digits-lenet", nodes=50, **options)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="epohcs"):
        paceline.submit.kubernetes("digits-lenet", settings=["epohcs=7"], **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Run", "1run", "run_1", "run-", "a" * 53, "a\nb", "a.b"])
def test_a_name_that_kubernetes_refuses_is_refused(name: str) -> None:
    with pytest.raises(LaunchError, match=r"Kubernetes"):
        manifest(name=name)


@pytest.mark.parametrize(
    ("options", "word"),
    [({"out": "/elsewhere/1"}, "/data"), ({"mount": "data", "out": "data/1"}, "data"), ({"nodes": 0}, "nodes")],
)
@pytest.mark.parametrize("kind", ["job", "trainjob"])
def test_invalid_pods_are_refused(kind: str, options: dict[str, Any], word: str) -> None:
    with pytest.raises((LaunchError, JobError), match=word):
        manifest(kind, **options)


# --- command lines ---


def test_srun_starts_one_program_on_each_node() -> None:
    argv = srun_argv(["gpu1", "gpu2"], ["python", "-m", "x"], cwd=Path("/data/a b"), environ={"A": "1"})
    assert argv[0] == "srun"
    assert {"--nodelist=gpu1,gpu2", "--ntasks=2", "--ntasks-per-node=1", "--chdir=/data/a b"} <= set(argv)
    assert argv[-5:] == ("env", "A=1", "python", "-m", "x")


def test_apptainer_shows_the_folders_and_changes_into_the_run() -> None:
    argv = container_argv(["python", "-m", "x"], "image.sif", cwd=Path("/data"), binds=[Path("/runs"), Path("/data")])
    before, after = argv[: argv.index("image.sif")], argv[argv.index("image.sif") + 1 :]
    assert before[0] == "apptainer" and {"exec", "--bind=/data:/data", "--bind=/runs:/runs", "--pwd=/data"} <= set(
        before
    )
    assert after[-3:] == ("python", "-m", "x") and "--nv" not in argv
    assert "--nv" in container_argv(["x"], "docker://a/b", cwd=Path("/"), gpus=True)


def test_podman_shares_the_network_and_needs_no_terminal() -> None:
    argv = container_argv(["python"], "podman://a/b:1", cwd=Path("/data"))
    assert argv[:2] == ("podman", "run") and argv[-1] == "python" and "a/b:1" in argv
    assert {"--rm", "--network=host", "--ipc=host", "--volume=/data:/data", "--workdir=/data"} <= set(argv)
    assert not any(re.fullmatch("-t|--tty|-it", word) or "nvidia" in word for word in argv)
    assert "--device=nvidia.com/gpu=all" in container_argv(["x"], "podman://a", cwd=Path("/"), gpus=True)


@pytest.mark.parametrize("image", ["image.sif", "podman://a/b:1"])
def test_a_container_gets_every_argument_unchanged(image: str, tmp_path: Path) -> None:
    stand_in = tmp_path / "stand-in"
    stand_in.write_text(f"#!{sys.executable} -S\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    stand_in.chmod(0o700)
    _, *words = container_argv(["x", 'it\'s "a" $word'], image, cwd=tmp_path)
    heard = subprocess.run([str(stand_in), *words], capture_output=True, text=True, check=True, timeout=60).stdout
    assert json.loads(heard) == words


@pytest.mark.parametrize(
    "image",
    ["", "a/b", "image.sqsh", "--nv.sif", "docker://", "docker://-x", "podman://", "podman://--privileged", "ftp://x"],
)
def test_what_is_no_image_is_refused(image: str) -> None:
    with pytest.raises(LaunchError, match="podman://"):
        container_argv(["x"], image, cwd=Path("/"))


def test_a_users_variables_are_on_no_command_line(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for where in (paceline.Where(), paceline.Where(hosts="gpu1:2,gpu2:2"), paceline.Where(container="image.sif")):
        paceline.launch("train.py", workers=2, where=where, dry_run=True)
    told = capsys.readouterr().out
    assert "PACELINE_RUN_DIR=" in told and "hunter2" not in told
