"""What Ray's own code asks of AWS for cluster.yaml: of a server with AWS' protocol, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto import mock_aws
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.util import prepare_config
from ray.autoscaler.tags import TAG_RAY_LAUNCH_CONFIG, TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
IMAGES = {"head": "ami-03cf127a", "gpu": "ami-1234abcd"}
# Ray would make it, and wait for half a minute until all of AWS knows
PROFILE = "ray-autoscaler-v1"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Each kind of node as AWS describes it, with its `Resources` as Ray's autoscaler counts them, and the `Volume`."""
    # Ray leaves the key of a new pair in ~/.ssh
    (tmp_path / ".ssh").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "of the test")
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    region = config["provider"]["region"]
    for kind, image in IMAGES.items():
        config["available_node_types"][kind]["node_config"]["ImageId"] = image
    with mock_aws():
        iam, ec2 = boto3.client("iam", region), boto3.client("ec2", region)
        iam.create_instance_profile(InstanceProfileName=PROFILE)
        iam.create_role(RoleName=PROFILE, AssumeRolePolicyDocument="{}")
        iam.add_role_to_instance_profile(InstanceProfileName=PROFILE, RoleName=PROFILE)
        ready = AWSNodeProvider.bootstrap_config(prepare_config(config))  # type: ignore[no-untyped-call]
        types = AWSNodeProvider.fillout_available_node_types_resources(ready)["available_node_types"]
        provider = AWSNodeProvider(ready["provider"], ready["cluster_name"])  # type: ignore[no-untyped-call]
        found = {}
        for kind, node_type in types.items():
            tags = {TAG_RAY_NODE_KIND: kind, TAG_RAY_USER_NODE_TYPE: kind, TAG_RAY_LAUNCH_CONFIG: "1"}
            [instance_id] = provider.create_node(node_type["node_config"], tags, 1)
            [reservation] = ec2.describe_instances(InstanceIds=[instance_id])["Reservations"]
            [instance] = reservation["Instances"]
            of_instance = [{"Name": "attachment.instance-id", "Values": [instance_id]}]
            [volume] = ec2.describe_volumes(Filters=of_instance)["Volumes"]
            found[kind] = {**instance, "Resources": node_type["resources"], "Volume": volume}
    return found


def test_nodes_are_made_as_the_file_says(started: dict[str, dict[str, Any]]) -> None:
    head, gpu = started["head"], started["gpu"]
    assert {kind: node["ImageId"] for kind, node in started.items()} == IMAGES
    # the head stays; the others are cheap, and may be taken away
    assert "InstanceLifecycle" not in head and gpu["InstanceLifecycle"] == "spot"
    assert gpu["Resources"]["GPU"] == 8 and "GPU" not in head["Resources"]
    assert (head["Volume"]["Size"], gpu["Volume"]["Size"]) == (100, 200)
    for node in (head, gpu):
        assert node["Volume"]["VolumeType"] == "gp3" and node["Volume"]["Encrypted"]
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert [group["GroupName"] for group in node["SecurityGroups"]] == ["alignedserve"]


def test_an_image_that_was_not_filled_in_is_none_of_rays_own() -> None:
    """Where there is no image at all, Ray takes one that is too old. These AWS refuses, by their names."""
    for node_type in yaml.safe_load((ROOT / "cluster.yaml").read_text())["available_node_types"].values():
        assert node_type["node_config"]["ImageId"].startswith("ami-of-")
