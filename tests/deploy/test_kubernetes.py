"""deploy/kubernetes: the fields exist, fit together, and lead to options that exist."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from alignedserve.cli.serve import command
from tests.deploy.manifests import errors

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
Json = dict[str, Any]


def manifests() -> dict[str, Json]:
    """By kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / "alignedserve.yaml").read_text())}


def pod() -> Json:
    found: Json = manifests()["StatefulSet"]["spec"]["template"]
    return found


def container() -> Json:
    [found] = pod()["spec"]["containers"]
    return dict(found)


def served() -> Json:
    name, *words = container()["args"]
    assert name == "serve"
    return command.make_context("serve", words).params


def test_each_field_is_one_that_there_is() -> None:
    for manifest in manifests().values():
        assert errors(manifest) == []


def test_the_service_leads_to_the_pod_and_probes_ask_its_port() -> None:
    service = manifests()["Service"]["spec"]
    labels = pod()["metadata"]["labels"]
    assert service["selector"].items() <= labels.items()
    assert manifests()["StatefulSet"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    port = served()["port"]
    assert [each["containerPort"] for each in container()["ports"]] == [port]
    assert service["ports"][0]["targetPort"] == port
    assert pod()["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    for probe in ("readinessProbe", "startupProbe"):
        assert container()[probe]["httpGet"] == {"path": "/health", "port": port}
    # `serve` restarts its own processes: a 503 is no reason to restart all.
    assert container()["livenessProbe"]["httpGet"] == {"path": "/", "port": port}


def test_it_has_keys_state_and_room_for_the_pool() -> None:
    mounts = {each["mountPath"]: each["name"] for each in container()["volumeMounts"]}
    volumes = {each["name"]: each for each in pod()["spec"]["volumes"]}
    options = served()
    assert options["host"] == "0.0.0.0"  # noqa: S104
    directory, _, name = options["api_key_file"].rpartition("/")
    assert name in [item["path"] for item in volumes[mounts[directory]]["secret"]["items"]]
    [claim] = manifests()["StatefulSet"]["spec"]["volumeClaimTemplates"]
    assert mounts["/state"] == claim["metadata"]["name"] and options["state_dir"].startswith("/state/")
    memory = volumes[mounts["/dev/shm"]]["emptyDir"]
    limit = container()["resources"]["limits"]["memory"]
    assert memory["medium"] == "Memory"
    assert options["pool_memory_bytes"] + (1 << 30) < gib(memory["sizeLimit"]) < gib(limit)
    assert pod()["spec"]["terminationGracePeriodSeconds"] > options["shutdown_timeout"] + 15


def gib(quantity: str) -> int:
    return int(quantity.removesuffix("Gi")) << 30


def test_it_is_not_roots() -> None:
    assert pod()["spec"]["securityContext"]["runAsNonRoot"]
    assert container()["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kustomize_renders_it_with_the_image() -> None:
    done = subprocess.run(["kubectl", "kustomize", str(FOLDER)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rendered = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert rendered.keys() == manifests().keys()
    assert all(errors(each) == [] for each in rendered.values())
    [found] = rendered["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert found["image"] == "registry.example/alignedserve:gpu"
