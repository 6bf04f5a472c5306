"""Imports point one way (docs/architecture.md), and what must stay light stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# The engine, the kernels and what they stand on run in any process, with these and nothing else installed.
DATA_PLANE = ["alignedserve/engine", "alignedserve/models", "kernels"]
DATA_PLANE_MAY_IMPORT = {"torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "jinja2", "tqdm"}


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return plain | {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("folder", DATA_PLANE)
def test_the_data_plane_needs_no_server(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        packages = {name.split(".")[0] for name in imports_of(path)}
        foreign = (
            packages - set(sys.stdlib_module_names) - DATA_PLANE_MAY_IMPORT - {"alignedserve", "kernels"}
        )
        assert not foreign, f"{path.relative_to(ROOT)} imports {foreign}"


def test_lower_parts_do_not_import_higher_ones() -> None:
    higher = ("alignedserve.llm", "alignedserve.cli", "alignedserve.collect", "alignedserve.demo")
    lower = [*(ROOT / "kernels").rglob("*.py"), *(ROOT / "alignedserve/engine").rglob("*.py")]
    lower += (ROOT / "alignedserve/models").rglob("*.py")
    for path in lower:
        upward = {name for name in imports_of(path) if name.startswith(higher)}
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"
    for path in (ROOT / "kernels").rglob("*.py"):
        upward = {
            name
            for name in imports_of(path)
            if name.startswith(("alignedserve.engine", "alignedserve.models"))
        }
        assert not upward, f"{path.relative_to(ROOT)} imports {upward}"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_help_and_kernels_load_no_torch() -> None:
    loaded = run_python("import sys, alignedserve, alignedserve.cli, kernels; print('torch' in sys.modules)")
    assert loaded.strip() == "False"


def test_the_launcher_sets_ray_up_before_it_loads_it() -> None:
    loaded = run_python("import sys, alignedserve.launch.serve; print('ray' in sys.modules)")
    assert loaded.strip() == "False"


def test_transformers_does_not_take_our_kernels_for_its_own() -> None:
    """It probes for a package of that name; ours has no distribution called so, and is not used."""
    code = (
        "import kernels; from transformers.utils import is_kernels_available; print(is_kernels_available())"
    )
    assert run_python(code).strip() == "False"
