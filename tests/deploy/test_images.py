"""Images have what requirements.lock needs: the glibc of its wheels, and a driver for its CUDA."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy import check_host

ROOT = Path(__file__).parents[2]
IMAGES: dict[str, dict[str, str]] = tomllib.loads((ROOT / "deploy/images.toml").read_text())
Version = tuple[int, int]

# The first driver for each CUDA (NVIDIA's release notes); later ones of the same first number run with it too.
DRIVERS = {12: 525, 13: 580}
OLD_TAGS = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


@cache
def pinned() -> dict[str, str]:
    requirements = [Requirement(line) for line in (ROOT / "requirements.lock").read_text().splitlines()]
    return {canonicalize_name(each.name): str(each.specifier).removeprefix("==") for each in requirements}


def glibc_of(tag: str) -> Version | None:
    """`tag`: of a platform, as manylinux_2_28_x86_64."""
    if found := re.match(r"manylinux_(\d+)_(\d+)_", tag):
        return int(found[1]), int(found[2])
    return OLD_TAGS.get(tag.split("_")[0])


def needed_glibc(wheel: str) -> Version | None:
    """`wheel`: the text of its WHEEL file. A wheel with several tags runs where the oldest of them does."""
    tags = re.findall(r"^Tag: \S+-(\S+)$", wheel, re.MULTILINE)
    versions = [version for tag in tags for part in tag.split(".") if (version := glibc_of(part))]
    return min(versions, default=None)


@cache
def glibc_of_the_lock() -> tuple[Version, str]:
    """Of the installed packages that the lock names, with the one that needs the newest."""

    def each(distribution: Distribution) -> tuple[Version, str] | None:
        name = canonicalize_name(distribution.metadata["Name"])
        version = needed_glibc(distribution.read_text("WHEEL") or "") if name in pinned() else None
        return (version, name) if version else None

    needs = [need for distribution in distributions() if (need := each(distribution))]
    names = {name for _, name in needs}
    assert {"torch", "numpy"} <= names, "these wheels say no glibc that they need"
    return max(needs)


def driver_of_the_lock() -> int:
    return DRIVERS[int(pinned()["cuda-toolkit"].split(".")[0])]


@pytest.mark.parametrize(
    "tags,expected",
    [
        (["cp311-cp311-manylinux2014_x86_64", "cp311-cp311-manylinux_2_17_x86_64"], (2, 17)),
        (["cp311-cp311-manylinux_2_34_x86_64"], (2, 34)),
        (["cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64"], (2, 27)),
        (["py3-none-manylinux1_x86_64"], (2, 5)),
        (["py3-none-any"], None),
        (["cp311-cp311-musllinux_1_2_x86_64"], None),
    ],
)
def test_a_wheel_says_what_it_needs(tags: list[str], expected: Version | None) -> None:
    assert needed_glibc("Wheel-Version: 1.0\n" + "".join(f"Tag: {tag}\n" for tag in tags)) == expected


def test_what_a_host_is_checked_for_is_what_the_lock_needs() -> None:
    glibc, package = glibc_of_the_lock()
    assert glibc == check_host.MIN_GLIBC, f"{package} needs glibc {glibc}"
    assert driver_of_the_lock() == check_host.MIN_DRIVER
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    assert asked == ">={}.{}".format(*check_host.MIN_PYTHON)


def problems(image: dict[str, Any]) -> list[str]:
    return [*check_host.problems_of_the_image(image["python"], image["glibc"], image.get("driver"))]


@pytest.mark.parametrize("name", IMAGES)
def test_each_image_fits(name: str) -> None:
    assert problems(IMAGES[name]) == []


def test_gpu_nodes_have_a_driver() -> None:
    assert "driver" in IMAGES["aws-gpu"]


@pytest.mark.parametrize(
    "too_old",
    [
        # what Ray takes where a file names no image: Ubuntu 18.04
        {"python": "3.6.9", "glibc": "2.27", "driver": "510.47.03"},
        {"python": "3.12.3", "glibc": "2.31"},
        {"python": "3.12.3", "glibc": "2.39", "driver": "570.86.15"},
        {"python": "3.10.12", "glibc": "2.35"},
        {"python": "3.12.3", "glibc": ""},
    ],
)
def test_an_older_image_would_not(too_old: dict[str, str]) -> None:
    assert problems(too_old)


def test_the_files_name_these_images() -> None:
    said = (ROOT / "cluster.yaml").read_text()
    for name in ("aws-gpu", "aws-head"):
        parameter = IMAGES[name]["parameter"]
        # as the command in the file puts it together
        assert parameter.removeprefix("/aws/service/").removesuffix("/ami-id") + ")" in said
    bases = re.findall(r"^FROM (\S+:\S+)", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    assert set(bases) == {IMAGES["container"]["from"]}
