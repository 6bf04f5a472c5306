"""deploy/helm makes what deploy/kubernetes has, and what its values say."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
import yaml

from alignedserve import __version__
from alignedserve.cli.serve import command
from tests.clients.environments import python_of
from tests.deploy.manifests import errors

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm"
Json = dict[str, Any]


@pytest.fixture(scope="module")
def helm(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The program: the one that is installed, or the one in a package for Python."""
    if found := shutil.which("helm"):
        return found
    [package] = (python_of("helm").parents[1] / "lib").glob("*/site-packages/aws_cdk/*/_jsii/*.tgz")
    with tarfile.open(package) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer
        path = Path(ZipFile(io.BytesIO(layer.read())).extract("helm/helm", tmp_path_factory.mktemp("helm")))
    path.chmod(0o755)
    return str(path)


def run(helm: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *arguments], capture_output=True, text=True)


def rendered(helm: str, name: str, *arguments: str) -> dict[str, Json]:
    """Returns the manifests by kind."""
    done = run(helm, "template", name, str(CHART), *arguments)
    assert done.returncode == 0, done.stderr
    found = {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}
    assert [error for each in found.values() for error in errors(each)] == []
    return found


def test_it_is_in_order(helm: str) -> None:
    done = run(helm, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_its_version_is_the_packages() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def test_without_other_values_it_is_what_kustomize_makes(helm: str) -> None:
    text = (ROOT / "deploy/kubernetes/alignedserve.yaml").read_text()
    expected = {each["kind"]: each for each in yaml.safe_load_all(text)}
    [container] = expected["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    container["image"] = "registry.example/alignedserve:gpu"
    assert rendered(helm, "alignedserve", "--namespace", "default") == expected


def test_values_become_fields_and_options(helm: str) -> None:
    values = {
        "image.tag": "0.1.0",
        "image.pullPolicy": "Always",
        "model": "",
        "gpus": "0",
        "poolGiB": "3",
        "options[0]": "--slo-ttft-ms=500",
        "storage.className": "fast",
        "service.type": "LoadBalancer",
        "service.port": "80",
        "nodeSelector.pool": "gpus",
        "tolerations[0].key": "nvidia.com/gpu",
        "tolerations[0].operator": "Exists",
    }
    options = [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
    found = rendered(helm, "chat", *options)
    assert {each["metadata"]["name"] for each in found.values()} == {"chat"}
    pod = found["StatefulSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"memory": "128Gi"}
    name, *words = container["args"]
    served = command.make_context(name, words).params
    assert (served["model"], served["slo_ttft_ms"], served["pool_memory_bytes"]) == (None, 500.0, 3 << 30)
    [shm] = [each["emptyDir"] for each in pod["volumes"] if each["name"] == "shm"]
    assert shm["sizeLimit"] == "11Gi"
    assert pod["nodeSelector"] == {"pool": "gpus"} and pod["tolerations"][0]["operator"] == "Exists"
    service = found["Service"]["spec"]
    assert service["type"] == "LoadBalancer"
    assert service["ports"] == [{"name": "http", "port": 80, "targetPort": 8000}]
    assert found["StatefulSet"]["spec"]["selector"]["matchLabels"] == service["selector"] == {"app": "chat"}


def test_operators_keys_are_mounted_where_the_option_says(helm: str) -> None:
    pod = rendered(helm, "chat", "--set", "operatorKeys=true")["StatefulSet"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    name, *words = container["args"]
    options = command.make_context(name, words).params
    [keys] = [each["secret"] for each in pod["volumes"] if each["name"] == "keys"]
    assert [f"/etc/alignedserve/{each['path']}" for each in keys["items"]] == [
        options["api_key_file"],
        options["operator_key_file"],
    ]


def test_half_a_core_is_a_number_of_cores(helm: str) -> None:
    found = rendered(helm, "chat", "--set-string", "cpu=0.5")
    [container] = found["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["requests"]["cpu"] == "0.5"


def test_a_pool_that_takes_the_pods_memory_is_refused(helm: str) -> None:
    done = run(helm, "template", "alignedserve", str(CHART), "--set", "memory=64Gi", "--set", "poolGiB=64")
    assert done.returncode != 0 and "memory=64Gi: must be more than poolGiB=64" in done.stderr


@pytest.mark.parametrize(
    "wrong", ["poolGib=3", "gpus=-1", "options[0]=slo", "service.type=Public", "memory=64K"]
)
def test_wrong_values_are_refused(helm: str, wrong: str) -> None:
    done = run(helm, "template", "alignedserve", str(CHART), "--set", wrong)
    assert done.returncode != 0 and "values don't meet the specifications of the schema" in done.stderr
