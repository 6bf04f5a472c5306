"""The installed wheel: one package with all its parts, beside other packages of the same names."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# A distribution that has a package `kernels` of its own, as Hugging Face's has.
THEIRS = """[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "kernels"
version = "1.0"
"""
USED = """
import kernels
import alignedserve.kernels.cpu.sampling
import alignedserve.decode_worker.schedule, alignedserve.prefill_worker.schedule
import alignedserve.kvpool.pool, alignedserve.router.router
print(kernels.OWNER)
print(alignedserve.router.router.__file__)
"""


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def built(project: Path, directory: Path) -> Path:
    """A wheel."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory, cwd=project)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(ROOT, tmp_path_factory.mktemp("wheel"))


def test_it_owns_one_name(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"alignedserve"}
    tracked = run(
        "git", "ls-files", "router", "kvpool", "kernels", "decode_worker", "prefill_worker", cwd=ROOT
    )
    assert {f"alignedserve/{name}" for name in tracked.split()} <= set(names)


@pytest.mark.slow
def test_it_works_beside_a_package_called_kernels(wheel: Path, tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    (theirs / "kernels").mkdir(parents=True)
    (theirs / "pyproject.toml").write_text(THEIRS)
    (theirs / "kernels" / "__init__.py").write_text("OWNER = 'somebody else'\n")
    home = tmp_path / "venv"
    venv.create(home)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    for each in (wheel, built(theirs, tmp_path / "built")):
        zipfile.ZipFile(each).extractall(site)
    # what it depends on is here; a path in a `.pth` file brings no other `.pth` files into effect
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    owner, router = run(home / "bin/python", "-c", USED, cwd=tmp_path).splitlines()
    assert owner == "somebody else"
    assert router == str(site / "alignedserve" / "router" / "router.py")
