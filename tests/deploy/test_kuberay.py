"""deploy/kuberay: the fields exist, fit together, and lead to options that exist."""

from __future__ import annotations

import copy
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray.scripts.scripts import start

from alignedserve.cli.batch import run
from alignedserve.cli.serve import command
from tests.deploy.manifests import errors
from tests.deploy.test_images import pinned

FOLDER = Path(__file__).parents[2] / "deploy/kuberay"
FILES = ["cluster.yaml", "batch.yaml"]
Json = dict[str, Any]

each_file = pytest.mark.parametrize("name", FILES)


def manifests(name: str) -> list[Json]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def of_kind(name: str, kind: str) -> list[Json]:
    return [each for each in manifests(name) if each["kind"] == kind]


def ray_cluster(name: str) -> Json:
    spec: Json = manifests(name)[0]["spec"]
    found: Json = spec.get("rayClusterSpec", spec)
    return found


def groups(name: str) -> list[Json]:
    spec = ray_cluster(name)
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def container(group: Json) -> Json:
    """Ray's, which is the first one for the operator."""
    found: Json = group["template"]["spec"]["containers"][0]
    return found


def volume_at(group: Json, path: str) -> Json:
    [mount] = [mount for mount in container(group)["volumeMounts"] if mount["mountPath"] == path]
    [volume] = [each for each in group["template"]["spec"]["volumes"] if each["name"] == mount["name"]]
    return dict(volume)


def num_bytes(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


def served() -> Json:
    """The options of `alignedserve serve` in cluster.yaml."""
    [line] = container(ray_cluster("cluster.yaml")["headGroupSpec"])["args"]
    words = shlex.split(line)
    return command.make_context("serve", words[words.index("serve") + 1 :]).params


def answered(data: Path) -> Json:
    """The options of the server that batch.yaml's job starts. `data` stands for the volume."""
    words = shlex.split(manifests("batch.yaml")[0]["spec"]["entrypoint"])
    assert words[:3] == ["alignedserve", "batch", "run"]
    assert volume_at(ray_cluster("batch.yaml")["headGroupSpec"], "/data")["persistentVolumeClaim"]
    (data / "requests.jsonl").touch()
    mine = [word.replace("/data/", f"{data}/") for word in words[3:]]
    rest = run.make_context("run", mine).params["serve_options"]
    return command.make_context("serve", list(rest)).params


# ---- fields ----


@each_file
def test_each_field_is_one_that_there_is(name: str) -> None:
    for manifest in manifests(name):
        assert errors(manifest) == []


@pytest.mark.parametrize(
    "path,value",
    [
        (("spec", "headGroupSpec", "template", "spec", "volumes", 0, "emptyDir", "sizelimit"), "2Gi"),
        (("spec", "headGroupSpec", "template", "spec", "containers", 0, "livenessProbe", "path"), "/health"),
        (("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("spec", "workerGroupSpecs", 0, "replicas"), "1"),
        (("spec", "workerGroupSpecs", 0, "minReplicas"), True),
        (("spec", "auth"), {"mode": "token"}),
        (("kind",), "Raycluster"),
    ],
)
def test_a_field_that_there_is_not_is_found(path: tuple[Any, ...], value: object) -> None:
    manifest = copy.deepcopy(manifests("cluster.yaml")[0])
    place = manifest
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    assert errors(manifest)


@each_file
def test_the_operators_own_schema_has_them_too(name: str) -> None:
    if "KUBERAY_CRDS" not in os.environ:
        pytest.skip("KUBERAY_CRDS names no folder with the operator's ray-operator/config/crd/bases")
    manifest = manifests(name)[0]
    file = Path(os.environ["KUBERAY_CRDS"]) / f"ray.io_{manifest['kind'].lower()}s.yaml"
    definition = yaml.load(file.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    [version] = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    schema = strict(version["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    found = jsonschema.Draft202012Validator(schema).iter_errors(manifest)
    assert [f"{list(error.path)}: {error.message}" for error in found] == []


def strict(schema: Any) -> Any:
    """Kubernetes drops unknown fields, and says so only if it is asked."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: strict(each) for key, each in schema.items()}
    if isinstance(closed.get("properties"), dict) and "type" in closed:
        closed.setdefault("additionalProperties", False)
    return closed


# ---- Ray ----


@each_file
def test_ray_is_that_of_the_lock_and_behind_a_token(name: str) -> None:
    spec = ray_cluster(name)
    assert spec["rayVersion"] == pinned()["ray"]
    assert spec["authOptions"] == {"mode": "token"}


@each_file
def test_ray_start_has_these_parameters(name: str) -> None:
    flags = {option for parameter in start.params for option in parameter.opts}
    for group in groups(name):
        assert {f"--{parameter}" for parameter in group["rayStartParams"]} <= flags


@each_file
def test_containers_are_not_roots(name: str) -> None:
    for group in groups(name):
        assert group["template"]["spec"]["securityContext"]["runAsNonRoot"]
        assert container(group)["securityContext"]["allowPrivilegeEscalation"] is False
        assert container(group)["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@each_file
def test_probes_ask_ports_that_are_open(name: str) -> None:
    for group in groups(name):
        each = container(group)
        opened = {port["containerPort"] for port in each.get("ports", [])}
        opened |= {int(value) for key, value in group["rayStartParams"].items() if key.endswith("-port")}
        for probe in ("readinessProbe", "livenessProbe"):
            [asked] = [each[probe][way]["port"] for way in ("httpGet", "tcpSocket") if way in each[probe]]
            assert asked in opened


# ---- the pool, GPUs and the model ----


@each_file
def test_workers_have_what_serve_asks_of_them(name: str, tmp_path: Path) -> None:
    options = answered(tmp_path) if name == "batch.yaml" else served()
    spec = ray_cluster(name)
    [workers] = spec["workerGroupSpecs"]
    limits = container(workers)["resources"]["limits"]
    assert int(limits["nvidia.com/gpu"]) == options["prefill_instances"] + options["decode_instances"]
    shm = volume_at(workers, "/dev/shm")["emptyDir"]
    assert shm["medium"] == "Memory"
    # Ray has a little of it, and what is in it counts as the container's memory
    assert (
        options["pool_memory_bytes"] + (1 << 30) < num_bytes(shm["sizeLimit"]) < num_bytes(limits["memory"])
    )
    assert options["min_islands"] <= workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert options["address"] == "auto"


@each_file
def test_all_of_rays_containers_have_shared_memory(name: str) -> None:
    for group in groups(name):
        assert volume_at(group, "/dev/shm")["emptyDir"]["medium"] == "Memory"


def test_weights_are_fetched_once_per_node_to_where_instances_look() -> None:
    [workers] = ray_cluster("cluster.yaml")["workerGroupSpecs"]
    [fetch] = workers["template"]["spec"]["initContainers"]
    assert fetch["command"][-1] == served()["model"]
    home = {"name": "HF_HOME", "value": "/models"}
    assert home in fetch["env"] and home in container(workers)["env"]
    assert volume_at(workers, "/models")["name"] == fetch["volumeMounts"][0]["name"]


# ---- the gateway ----


def test_the_service_leads_to_a_gateway_that_is_asked_for_its_health() -> None:
    head = ray_cluster("cluster.yaml")["headGroupSpec"]
    [service] = [
        each for each in of_kind("cluster.yaml", "Service") if each["metadata"]["name"] == "alignedserve"
    ]
    [port] = service["spec"]["ports"]
    assert service["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()
    options = served()
    assert port["targetPort"] == options["port"] == container(head)["ports"][1]["containerPort"]
    for probe in ("readinessProbe", "startupProbe"):
        assert container(head)[probe]["httpGet"] == {"path": "/health", "port": options["port"]}
    # A cluster that waits for a node must not be started again for it.
    assert container(head)["livenessProbe"]["httpGet"] == {"path": "/", "port": options["port"]}


def test_the_gateway_listens_beyond_its_pod_and_has_keys() -> None:
    head = ray_cluster("cluster.yaml")["headGroupSpec"]
    options = served()
    assert options["host"] == "0.0.0.0"  # noqa: S104
    folder, file = options["api_key_file"].rsplit("/", 1)
    secret = volume_at(head, folder)["secret"]
    assert [item["path"] for item in secret["items"]] == [file]


def test_it_has_time_to_drain_and_ray_stays_meanwhile() -> None:
    head = ray_cluster("cluster.yaml")["headGroupSpec"]
    assert head["template"]["spec"]["terminationGracePeriodSeconds"] > served()["shutdown_timeout"] + 10
    [line] = container(head)["args"]
    # `serve` is what gets the signal; without --block Ray is not its parent
    assert re.search(r"\$\{KUBERAY_GEN_RAY_START_CMD/--block/\} &&\s+exec alignedserve serve ", line)
    assert manifests("cluster.yaml")[0]["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


@pytest.mark.parametrize("starts", [True, False])
def test_the_head_starts_ray_and_then_becomes_serve(tmp_path: Path, starts: bool) -> None:
    """With programs that say how they were called. Where Ray does not start, Kubernetes begins again."""
    for program in ("ray", "alignedserve"):
        (tmp_path / program).write_text(f'#!/bin/sh\necho $$ {program} "$@"\nexit {0 if starts else 3}\n')
        (tmp_path / program).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        # as the operator makes it
        "KUBERAY_GEN_RAY_START_CMD": "ray start --head  --block  --dashboard-host=0.0.0.0  --num-cpus=0 ",
        "REDIS_PASSWORD": "word",
    }
    head = container(ray_cluster("cluster.yaml")["headGroupSpec"])
    command: list[str] = [*head["command"], *head["args"]]
    tini, _, *words = command
    assert tini == "tini"
    started = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    output, _ = started.communicate(timeout=60)
    called = [line.split(maxsplit=1) for line in output.splitlines()]
    assert called[0][1] == "ray start --head --dashboard-host=0.0.0.0 --num-cpus=0"
    if not starts:
        assert started.returncode == 3 and len(called) == 1
        return
    [_, (pid, serving)] = called
    # it takes the place of the shell, so signals are its own
    assert int(pid) == started.pid
    assert serving.startswith("alignedserve serve ") and "redis://:word@alignedserve-redis:6379/0" in serving


def test_its_redis_is_the_one_that_is_made() -> None:
    [service] = of_kind("cluster.yaml", "Service")[1:]
    [redis] = of_kind("cluster.yaml", "StatefulSet")
    assert f"@{service['metadata']['name']}:{service['spec']['ports'][0]['port']}/" in served()["redis_url"]
    assert service["spec"]["selector"] == redis["spec"]["template"]["metadata"]["labels"]
    assert redis["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]


def test_all_containers_of_ray_are_of_one_image() -> None:
    assert len({container(group)["image"] for name in FILES for group in groups(name)}) == 1


def test_secrets_are_made_by_the_commands_in_the_file() -> None:
    """All but Ray's token, which the operator makes."""
    text = (FOLDER / "cluster.yaml").read_text()
    [made] = re.findall(r"create secret generic (\S+)", text)
    keys = set(re.findall(r"--from-(?:literal|file)=(\w+)", text))
    asked = re.findall(r"secretKeyRef: \{name: (\S+), key: (\w+)\}", text)
    assert asked and {name for name, _ in asked} == {made}
    assert {key for _, key in asked} | {"api_keys"} == keys
