from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from alignedserve.kernels.cpu import build


def python(code: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **env}, stdout=-1, text=True)


def test_importing_kernels_imports_nothing_heavy() -> None:
    process = python(
        "import sys, alignedserve.kernels; print({'torch', 'ctypes', 'numpy'} & set(sys.modules))"
    )
    assert process.communicate()[0].strip() == "set()"


def test_a_build_is_found_again() -> None:
    path = build.build(build.library_path())
    before = path.stat()
    assert build.build(build.library_path()) == path
    assert path.stat().st_mtime_ns == before.st_mtime_ns


def test_no_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(build.NoCompiler, match=r"no-such-compiler.*apt-get install"):
        build.build(build.library_path())


def test_a_refused_source_shows_the_compilers_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "broken.cpp").write_text("int main() { return undeclared_name; }")
    monkeypatch.setattr(build, "SOURCE_DIR", source)
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(build.BuildFailed, match="undeclared_name"):
        build.build(build.library_path())
    assert list((tmp_path / "cache").iterdir()) == []


def test_of_processes_that_begin_together_one_builds(tmp_path: Path) -> None:
    source, compiler, cache = tmp_path / "csrc", tmp_path / "compiler", tmp_path / "cache"
    source.mkdir()
    (source / "small.cpp").write_text('extern "C" int one() { return 1; }')
    compiler.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\nexec {build.find_compiler()} "$@"\n')
    compiler.chmod(0o755)
    code = (
        "from pathlib import Path; from alignedserve.kernels.cpu import build; "
        f"build.SOURCE_DIR = Path({str(source)!r}); print(build.build(build.library_path()))"
    )
    processes = [python(code, ALIGNEDSERVE_CACHE_DIR=str(cache), CXX=str(compiler)) for _ in range(3)]
    paths = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [str(path) for path in cache.iterdir()] == list(paths)
    assert (tmp_path / "calls").read_text().count("-shared") == 1


@pytest.mark.parametrize("folder", ["/dev/null", "/dev/null/below"])
def test_a_cache_that_cannot_be_written_says_what_to_do(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", folder)
    with pytest.raises(build.BuildFailed, match=rf"{folder}: .*\$ALIGNEDSERVE_CACHE_DIR"):
        build.build(build.library_path())


def test_a_library_cut_off_is_built_again(tmp_path: Path) -> None:
    source = tmp_path / "csrc"
    source.mkdir()
    (source / "small.cpp").write_text(
        'extern "C" __attribute__((visibility("default"))) int one() { return 1; }'
    )
    code = (
        "from pathlib import Path; from alignedserve.kernels.cpu import build, library; "
        f"build.SOURCE_DIR = Path({str(source)!r}); build.build(build.library_path()).write_bytes(b''); "
        "print(library._load().functions.one())"
    )
    process = python(code, ALIGNEDSERVE_CACHE_DIR=str(tmp_path / "cache"))
    assert process.communicate()[0].strip() == "1"


def test_no_library_is_compiled_where_it_could_not_be_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ALIGNEDSERVE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    monkeypatch.setattr(build, "_compile", None)
    with pytest.raises(build.BuildFailed, match=rf"{tmp_path}, .* noexec\. Set \$ALIGNEDSERVE_CACHE_DIR"):
        build.build(build.library_path())
