"""launch/kubernetes: each field of its files exists, with the right type, and what two files must say alike is alike.
Four launchers told by PET_* alone are one job of four ranks, and a second job in their folder ends with 75.
"""

import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megamix.launch.exit_status import EXIT_STATUS, NO_MEMORY, WRONG_INPUT
from megamix.launch.run_lock import run_lock
from megamix.tools.ranks import DEADLINE_S
from tests.builders import tiny_job
from tests.conftest import FULL
from tests.programs import with_settings

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "launch/kubernetes"

# The fields of Kubernetes 1.36 and of Kubeflow Trainer 2 that the files use. A type stands for a value, a list for any
# number of such values, a string for this very value.
NAMED, LABELS, LIMITS = {"name": str}, {"labels": dict}, {"limits": dict}
ENV = NAMED | {"value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}
CONTAINER = NAMED | {"image": str, "args": [str], "env": [ENV], "resources": LIMITS}
CONTAINER["volumeMounts"] = [NAMED | {"mountPath": str}]
MEMORY, CLAIM = {"medium": "Memory", "sizeLimit": str}, {"claimName": str}
VOLUME = NAMED | {"emptyDir": MEMORY, "persistentVolumeClaim": CLAIM}
POD = {"subdomain": str, "restartPolicy": "Never", "terminationGracePeriodSeconds": int}
POD["securityContext"] = {"runAsNonRoot": bool, "runAsUser": int, "fsGroup": int}
POD |= {"containers": [CONTAINER], "volumes": [VOLUME]}
CODES = {"containerName": str, "operator": "In", "values": [int]}
RULE = {"action": str, "onExitCodes": CODES, "onPodConditions": [{"type": str, "status": str}]}
JOB = {"completionMode": "Indexed", "completions": int, "parallelism": int, "backoffLimit": int}
JOB |= {"podFailurePolicy": {"rules": [RULE]}, "template": {"metadata": LABELS, "spec": POD}}
NODES = {"replicatedJobs": [{"name": "node", "template": {"metadata": LABELS, "spec": JOB}}]}
RUNTIME = {"mlPolicy": {"numNodes": int, "torch": dict}, "template": {"spec": NODES}}
TRAINER = {"command": [str], "args": [str], "numNodes": int, "resourcesPerNode": LIMITS}
TRAINED = {"runtimeRef": NAMED | {"apiGroup": str, "kind": str}, "trainer": TRAINER}
SERVICE = {"clusterIP": "None", "publishNotReadyAddresses": bool, "selector": {"job-name": str}}
KUBEFLOW = "trainer.kubeflow.org/v1alpha1"
KINDS = {
    "Service": {"apiVersion": "v1", "spec": SERVICE},
    "Job": {"apiVersion": "batch/v1", "spec": JOB},
    "TrainingRuntime": {"apiVersion": KUBEFLOW, "spec": RUNTIME},
    "TrainJob": {"apiVersion": KUBEFLOW, "spec": TRAINED},
}


def _check(value, wanted, where):
    if isinstance(wanted, dict):
        assert value.keys() <= wanted.keys(), where
        for key, held in value.items():
            _check(held, wanted[key], f"{where}.{key}")
    elif isinstance(wanted, list):
        for held in value:
            _check(held, wanted[0], where)
    elif isinstance(wanted, str):
        assert value == wanted, where
    else:
        assert type(value) is wanted, where


@pytest.fixture
def objects():
    texts = [(FOLDER / name).read_text() for name in ("job.yaml", "trainjob.yaml")]
    return {each["kind"]: each for text in texts for each in yaml.safe_load_all(text)}


def test_every_field_exists_and_has_its_type(objects):
    assert objects.keys() == KINDS.keys()
    for kind, each in objects.items():
        wanted = {"kind": kind, "metadata": NAMED, **KINDS[kind]}
        _check(each, wanted, kind)
        assert each.keys() == wanted.keys()


def test_kubernetes_own_schemas_take_the_files(objects):
    schemas = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate, 72 MB of schemas")
    runtime = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "node"}, "spec": runtime["spec"]}
    for each in (objects["Service"], objects["Job"], inner):
        schemas.validate(each, "1.36", strict=True)


def test_what_must_be_alike_is_alike(objects):
    job = objects["Job"]["spec"]
    node = objects["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    env = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    machines = {job["completions"], job["parallelism"], int(env["NNODES"])}
    assert machines == {objects["TrainJob"]["spec"]["trainer"]["numNodes"]}
    service = objects["Service"]
    assert env["MASTER_ADDR"] == f"{objects['Job']['metadata']['name']}-0.{service['metadata']['name']}"
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": objects["Job"]["metadata"]["name"]}
    for each in (job, node):
        inner = each["template"]["spec"]
        (container,) = inner["containers"]
        fails, drained, again = each["podFailurePolicy"]["rules"]
        assert fails["onExitCodes"]["values"] == [WRONG_INPUT, EXIT_STATUS["gave_up"], NO_MEMORY]
        assert again["onExitCodes"]["values"] == [EXIT_STATUS["preempted"]]
        assert [rule["action"] for rule in (fails, drained, again)] == ["FailJob", "Ignore", "Ignore"]
        assert {rule["onExitCodes"]["containerName"] for rule in (fails, again)} == {container["name"]}
        limit = next(each["value"] for each in container["env"] if each["name"] == "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        assert int(limit) < inner["terminationGracePeriodSeconds"]
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in inner["volumes"]}


def test_the_image_has_what_the_pods_start(objects):
    text = (FOLDER / "Dockerfile").read_text()
    copied = " ".join(re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE)).split()
    assert all((ROOT / name).exists() for name in copied)
    (user,) = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    pod = objects["Job"]["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsUser"] == int(user)
    assert f"ENTRYPOINT {json.dumps(objects['TrainJob']['spec']['trainer']['command'])}" in text
    config = pod["containers"][0]["args"][0]
    assert (ROOT / config).is_file()
    assert config.partition("/")[0] in copied


def _launch(job, **settings):
    told = with_settings(MEGAMIX_PYTHON=sys.executable, OMP_NUM_THREADS=1, PET_NPROC_PER_NODE=1, **settings)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(["launch/pretrain.sh", str(job)], cwd=ROOT, env=told, text=True, **pipes)


@pytest.fixture
def job(tmp_path, data):
    path = tmp_path / "job.toml"
    path.write_text(tiny_job(tmp_path, tokens=data, valid=None, steps=3, eval_interval=0).text)
    return path


def test_a_second_job_on_a_held_folder_ends_with_75(tmp_path, job):
    (tmp_path / "run").mkdir()
    with run_lock(tmp_path / "run", print):
        second = _launch(job)
        said, _ = second.communicate(timeout=DEADLINE_S)
    assert second.returncode == 75, said
    assert "is in use by pid" in said


@pytest.mark.skipif(not FULL, reason="--full: four launchers; that the names are read, tests/test_launch.py proves")
def test_four_launchers_with_kubeflow_s_names_are_one_job_of_four(job):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"PET_NNODES": 4, "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": port}
    launchers = [_launch(job, PET_NODE_RANK=rank, **place) for rank in range(4)]
    said = [launcher.communicate(timeout=DEADLINE_S)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0] * 4, said
    assert sum("megamix | 4 rank(s)" in one for one in said) == 1
