"""Manifests against the schemas of Kubernetes and of the Kubeflow Trainer. No cluster is asked."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import LaunchError
from paceline.launch.kubernetes import Pods, job_manifest, train_job_manifest

yaml = pytest.importorskip("yaml", reason="manifests need PyYAML (paceline[kubernetes])")

PODS = Pods(
    image="registry.example/train@sha256:" + "ab" * 32,
    num_pods=2,
    workers_per_pod=8,
    use_gpus=True,
    claim="runs",
    mount=Path("/data"),
    run_dir=Path("/data/runs/1"),
    cpus_per_worker=12,
    memory_bytes=500 << 30,
)
BARE = dataclasses.replace(PODS, use_gpus=False, memory_bytes=None)
PROGRAM = ["-m", "paceline.train", "/data/runs/1", "--note", "$(HOME): yes"]

# Maps whose keys are the user's: any is right.
FREE = {"labels", "selector", "requests", "limits"}


def _documents(pods: Pods = PODS) -> list[Any]:
    return list(yaml.safe_load_all(job_manifest("run-1", PROGRAM, pods)))


def _train_job(pods: Pods = PODS) -> Any:
    return yaml.safe_load(train_job_manifest("run-1", PROGRAM, pods))


def _keys(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every key that a schema has to know."""
    if isinstance(value, dict) and not (path and path[-1] in FREE):
        for key, item in value.items():
            yield (*path, key)
            yield from _keys(item, (*path, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _keys(item, (*path, number))


def _with_typo(document: Any, path: tuple[Any, ...]) -> Any:
    changed = copy.deepcopy(document)
    place = changed
    for step in path[:-1]:
        place = place[step]
    place[path[-1] + "x"] = place.pop(path[-1])
    return changed


@pytest.mark.parametrize("pods", [PODS, BARE], ids=["full", "bare"])
def test_job_and_service_are_what_kubernetes_knows(pods: Pods) -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for document in _documents(pods):
        schemas.validate(document, schemas.latest_version(), strict=True)


@pytest.mark.slow
def test_every_typo_in_a_job_would_be_found() -> None:
    schemas = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    num_typos = 0
    for document in _documents():
        for path in _keys(document):
            if path in (("apiVersion",), ("kind",)):
                continue  # by which the schema is found
            with pytest.raises(schemas.ValidationError):
                schemas.validate(_with_typo(document, path), schemas.latest_version(), strict=True)
            num_typos += 1
    assert num_typos > 60


@pytest.mark.parametrize("pods", [PODS, BARE], ids=["full", "bare"])
def test_a_train_job_is_what_kubeflow_knows(pods: Pods) -> None:
    document = _train_job(pods)
    assert _through_kubeflow(document) == document


def test_every_typo_in_a_train_job_would_be_found() -> None:
    document = _train_job()
    for path in _keys(document):
        changed = _with_typo(document, path)
        try:
            assert _through_kubeflow(changed) != changed, path
        except ValueError:
            continue  # a key that must be there is gone


def _through_kubeflow(document: Any) -> Any:
    """Kubeflow's models drop what they do not know without a word."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow_trainer_api is not installed")
    return models.TrainerV1alpha1TrainJob.from_dict(copy.deepcopy(document)).to_dict()


def test_a_job_says_what_was_asked() -> None:
    service, job = _documents()
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"], spec["backoffLimit"]) == (
        "Indexed",
        2,
        2,
        0,
    )
    pod = spec["template"]["spec"]
    assert (pod["restartPolicy"], pod["subdomain"]) == ("Never", service["metadata"]["name"])
    (container,) = pod["containers"]
    assert container["command"] == [
        *("python", "-m", "torch.distributed.run", "--max-restarts=0", "--nnodes=2", "--nproc-per-node=8"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=run-1-0.run-1:29500", "--rdzv-id=run-1"),
        *("-m", "paceline.launch.worker", "-m", "paceline.train", "/data/runs/1", "--note", "$$(HOME): yes"),
    ]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "512000Mi"}
    assert container["resources"]["requests"] == {"cpu": "96", "nvidia.com/gpu": "8", "memory": "512000Mi"}
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    assert variables["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert variables["PACELINE_RUN_DIR"] == "/data/runs/1"
    assert {volume["name"] for volume in pod["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"]["allowPrivilegeEscalation"] is False


def test_pods_without_gpus_ask_for_none() -> None:
    assert "nvidia" not in job_manifest("run-1", PROGRAM, BARE)
    assert "nvidia" not in train_job_manifest("run-1", PROGRAM, BARE)


def test_torchrun_understands_its_options() -> None:
    arguments = _documents()[1]["spec"]["template"]["spec"]["containers"][0]["command"][3:]
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    options = parser.parse_args(arguments)
    assert (options.nnodes, options.nproc_per_node, options.module) == ("2", "8", True)
    assert options.training_script == "paceline.launch.worker"
    assert options.training_script_args[:2] == ["-m", "paceline.train"]


@pytest.mark.parametrize("name", ["", "Run", "1run", "run_1", "run-", "a" * 53, "a\nb", "a.b"])
def test_names_that_kubernetes_refuses(name: str) -> None:
    with pytest.raises(LaunchError, match="is invalid in Kubernetes"):
        job_manifest(name, PROGRAM, PODS)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"run_dir": Path("/elsewhere/1")}, "should lie below /data"),
        ({"mount": Path("data"), "run_dir": Path("data/1")}, "should lie below data"),
        ({"claim": "Runs!"}, "PersistentVolumeClaim"),
        ({"image": ""}, "should be the name of a container image"),
        ({"num_pods": 0}, "nodes, workers and cpus should each be"),
    ],
)
def test_pods_that_cannot_be_meant(values: dict[str, Any], words: str) -> None:
    for manifest in (job_manifest, train_job_manifest):
        with pytest.raises(LaunchError, match=words):
            manifest("run-1", PROGRAM, dataclasses.replace(PODS, **values))


def test_without_yaml_it_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError, match=r"install paceline\[kubernetes\]"):
        job_manifest("run-1", PROGRAM, PODS)
