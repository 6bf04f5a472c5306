"""The pool decides and keeps counts: it needs numpy and the base modules, and comes up without torch or Ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.test_imports import imports_of

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "alignedserve.types",
    "alignedserve.kv.format",
    "alignedserve.kv.span",
    "alignedserve.protocol.messages",
    "numpy",
    "numpy.typing",
}
# the process around the pool
SHELL = "process.py"


def test_it_stands_on_the_base_modules_only() -> None:
    for path in (ROOT / "kvpool").glob("*.py"):
        foreign = {
            name
            for name in imports_of(path)
            if name.split(".")[0] not in sys.stdlib_module_names
            and not name.startswith("alignedserve.kvpool.")
            and name not in ALLOWED
        }
        assert not foreign or path.name == SHELL, f"{path.name} imports {foreign}"


def test_it_loads_neither_torch_nor_ray() -> None:
    ours = "alignedserve.kvpool.pool, alignedserve.kvpool.segment"
    code = f"import sys, {ours}; print({{'torch', 'ray'}} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.stdout.strip() == "set()", done.stderr
