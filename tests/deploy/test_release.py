"""What `make release` builds: an sdist and wheels. Their metadata is true, and a wheel serves without a compiler."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen
from zipfile import ZipFile

import pytest

from alignedserve import LLM, SamplingParams, __version__
from alignedserve.kernels.cpu.build import cpu_features
from alignedserve.kernels.cpu.levels import LEVELS, best
from alignedserve.launch.ports import free_port
from deploy import check_host, release
from hatch_build import MANYLINUX_2_34, absolute, number, platform_of

ROOT = Path(__file__).parents[2]
COMPILER = "x86_64-linux-gnu-g++"
LEVEL = best(LEVELS["x86_64"], "x86_64", set(cpu_features().split()))
REPOSITORY = "https://code.example.org/team/alignedserve/blob/main"
PROMPTS = ["Count from 7 to 12.", "What is 2 + 3?", "Spell house."]
START_S = 300.0


def builds(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test for which kernels are built, for a minute."""
    why = f"needs {COMPILER} and a processor with AVX2"
    skipped = pytest.mark.skipif(not LEVEL or not shutil.which(COMPILER), reason=why)
    marked: Callable[..., None] = skipped(pytest.mark.slow(pytest.mark.drawn(one_in=4, turn=1)(test)))
    return marked


# ---- what it builds ----


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """An sdist, a wheel, and a wheel with kernels for this processor."""
    assert LEVEL is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCS_REPOSITORY", REPOSITORY)
        return release.build(ROOT, tmp_path_factory.mktemp("dist"), {COMPILER: LEVEL})


def named(files: list[Path], end: str) -> Path:
    [found] = [file for file in files if file.name.endswith(end)]
    return found


def contents(wheel: Path) -> Mapping[str, int]:
    return {each.filename: each.CRC for each in ZipFile(wheel).infolist()}


def test_the_guide_has_the_sizes(tmp_path: Path) -> None:
    """Of those that need no compiler."""
    guide = (ROOT / "docs/guides/releasing.md").read_text()
    for target, end in (("sdist", "0.tar.gz"), ("wheel", "none-any.whl")):
        release.hatchling(ROOT, tmp_path, target)
        [file] = tmp_path.glob(f"*{end}")
        found = re.search(rf"^\| `[^`]*{end}` \| ([0-9.]+) MB \|", guide, re.MULTILINE)
        assert found and file.stat().st_size / 1e6 == pytest.approx(float(found[1]), rel=0.05), file


def test_one_machine_or_a_rehearsal_can_be_asked_for() -> None:
    assert release.parsed(["--only", "x86_64"]).only == ["x86_64"]
    with pytest.raises(SystemExit):
        release.parsed(["--only", "riscv64"])


def test_a_rehearsal_goes_on_where_a_release_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist/kept").touch()
    monkeypatch.setattr(release, "DIST", tmp_path / "dist")
    monkeypatch.setattr(release, "REHEARSAL", tmp_path / "build/rehearsal")
    monkeypatch.setattr(release, "COMPILERS", {"x86_64": "no-such-compiler"})
    monkeypatch.setattr(release, "report", lambda wheel, root: {})
    monkeypatch.setattr("deploy.sbom.read", lambda report: {})
    monkeypatch.setattr("deploy.sbom.write", lambda packages, out: [])
    with pytest.raises(SystemExit, match="no-such-compiler is not installed"):
        release.main([])
    release.main(["--dry-run"])
    said = capsys.readouterr().out
    assert "A release would stop here: no-such-compiler is not installed\n" in said
    assert said.endswith("This was a rehearsal\n")
    assert {each.suffix for each in (tmp_path / "build/rehearsal").iterdir()} == {".gz", ".whl", ""}
    assert [each.name for each in (tmp_path / "dist").iterdir()] == ["kept"]


@builds
def test_an_index_would_take_them(files: list[Path]) -> None:
    assert [name.name.removeprefix(f"alignedserve-{__version__}") for name in files] == [
        "-py3-none-any.whl",
        "-py3-none-manylinux_2_34_x86_64.whl",
        ".tar.gz",
    ]
    assert [problem for file in files for problem in release.problems_of(file)] == []
    metadata = release.metadata_of(files[0]).decode()
    assert "Project-URL: Source, https://code.example.org/team/alignedserve\n" in metadata
    assert f"({REPOSITORY}/docs/quickstart.md)" in metadata


@builds
def test_the_sdist_makes_the_wheel_that_the_tree_makes(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCS_REPOSITORY", REPOSITORY)
    release.hatchling(ROOT, tmp_path, "wheel")
    [wheel] = tmp_path.iterdir()
    plain = contents(named(files, "any.whl"))
    assert contents(wheel) == plain
    # the other one has a library more
    of_dist_info = re.compile(r"dist-info/(WHEEL|RECORD)$")
    [library] = (
        contents(named(files, "x86_64.whl")).items()
        - plain.items()
        - {each for each in contents(named(files, "x86_64.whl")).items() if of_dist_info.search(each[0])}
    )
    assert re.search(rf"/prebuilt/[0-9a-f]{{12}}-{LEVEL}\.so$", library[0])


@builds
def test_the_tag_is_true(files: list[Path], tmp_path: Path) -> None:
    archive = ZipFile(named(files, "x86_64.whl"))
    [name] = [each for each in archive.namelist() if each.endswith(".so")]
    library = archive.extract(name, tmp_path)
    symbols = subprocess.check_output(["readelf", "--wide", "--version-info", library], text=True)
    needed = set(re.findall(r"Name: (\w+)_([0-9.]+) ", symbols))
    assert {name for name, _ in needed} == MANYLINUX_2_34.keys()
    assert all(number(version) <= number(MANYLINUX_2_34[name]) for name, version in needed)
    assert number(MANYLINUX_2_34["GLIBC"]) == check_host.MIN_GLIBC
    dynamic = subprocess.check_output(["readelf", "--dynamic", library], text=True)
    libraries = {each.partition(".so")[0] for each in re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)}
    assert libraries <= {"libstdc++", "libgcc_s", "libm", "libc", "ld-linux-x86-64"}


@pytest.mark.parametrize(
    "symbols,platform",
    [
        (["GLIBC_2.34", "GLIBCXX_3.4.29", "CXXABI_1.3", "GCC_3.0"], "manylinux_2_34_x86_64"),
        (["GLIBC_2.2.5", "GLIBC_2.38"], "linux_x86_64"),
        (["GLIBC_2.17", "GLIBCXX_3.4.30"], "linux_x86_64"),
    ],
)
def test_libraries_that_need_more_get_no_tag_of_many(
    symbols: list[str], platform: str, tmp_path: Path
) -> None:
    library = tmp_path / "library.so"
    library.write_bytes(b"\0" + b"\0".join(each.encode() for each in symbols) + b"\0")
    assert platform_of([library], "x86_64") == platform


# ---- what it checks ----


def test_links_of_the_readme_lead_to_the_repository() -> None:
    text = "[a](docs/gpu.md#b) ![c](docs/page.png) [d](https://x.org/) [e](#f)"
    assert absolute(text, REPOSITORY) == (
        f"[a]({REPOSITORY}/docs/gpu.md#b) ![c]({REPOSITORY.replace('blob', 'raw')}/docs/page.png) "
        "[d](https://x.org/) [e](#f)"
    )


def git(*words: str, cwd: Path) -> None:
    subprocess.run(["git", "-c", "user.name=x", "-c", "user.email=x", *words], cwd=cwd, check=True)


def test_a_tree_that_is_not_ready_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCS_REPOSITORY", raising=False)
    (tmp_path / "docs/site").mkdir(parents=True)
    (tmp_path / "docs/site/site.toml").write_text('repository = ""\n')
    (tmp_path / "CHANGELOG.md").write_text(f"## [{__version__}] - unreleased\n")
    git("init", "-q", cwd=tmp_path)
    assert len(list(release.problems_of_the_tree(tmp_path))) == 3
    (tmp_path / "docs/site/site.toml").write_text(f'repository = "{REPOSITORY}"\n')
    (tmp_path / "CHANGELOG.md").write_text(f"## [{__version__}] - 2026-12-01\n")
    git("add", ".", cwd=tmp_path)
    git("commit", "-qm", "x", cwd=tmp_path)
    assert list(release.problems_of_the_tree(tmp_path)) == []


def test_sums_are_those_of_sha256sum(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x")
    (tmp_path / "SHA256SUMS").write_text(release.sums([tmp_path / "a"]))
    subprocess.run(["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=tmp_path, check=True)


# ---- the wheel elsewhere ----


def ask(url: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else None
    with urlopen(Request(url, data, {"content-type": "application/json"}), timeout=60) as answer:
        return json.loads(answer.read() or "null")


def without_compilers(folder: Path) -> None:
    """Makes a folder of this machine's programs, except for compilers."""
    folder.mkdir()
    for program in Path("/usr/bin").iterdir():
        if not re.search(r"(^|-)(c\+\+|g\+\+|gcc|cc|clang\+\+|clang)(-[\d.]+)?$", program.name):
            (folder / program.name).symlink_to(program)
    assert not any(shutil.which(name, path=str(folder)) for name in ("g++", "clang++", "c++"))


@contextmanager
def serving(program: Path, environment: dict[str, str], log: Path) -> Iterator[str]:
    port, state = free_port("127.0.0.1"), TemporaryDirectory(prefix="state-")
    command = [str(program), "serve", "--port", str(port), "--state-dir", state.name]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, cwd=log.parent, stdout=output, stderr=-2)
    try:
        url, end_s = f"http://127.0.0.1:{port}", time.monotonic() + START_S
        while True:
            assert process.poll() is None and time.monotonic() < end_s, log.read_text()
            try:
                ask(f"{url}/health")
                break
            except URLError:
                time.sleep(0.2)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
        state.cleanup()


@builds
def test_it_serves_elsewhere_without_a_compiler(files: list[Path], tmp_path: Path) -> None:
    home, cache = tmp_path / "venv", tmp_path / "cache"
    venv.create(home)
    pip = [sys.executable, "-m", "pip", "--python", str(home / "bin/python"), "install", "-q"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(named(files, "x86_64.whl"))], check=True)
    # what it depends on is here; a path in a `.pth` file brings no other `.pth` files into effect
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    without_compilers(tmp_path / "bin")
    environment = {"PATH": f"{home / 'bin'}:{tmp_path / 'bin'}", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
    environment |= {"ALIGNEDSERVE_CACHE_DIR": str(cache)}
    program, log = home / "bin/alignedserve", tmp_path / "log"
    doctor = subprocess.run(
        [program, "doctor", "demo"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert f"backend cpu, from the wheel ({LEVEL})" in doctor.stdout, doctor.stdout + doctor.stderr
    with serving(program, environment, log) as url:
        body = {"model": "demo", "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        answers = [ask(f"{url}/v1/completions", body | {"prompt": prompt}) for prompt in PROMPTS]
    assert not cache.exists() and "using torch instead" not in log.read_text()
    outputs = LLM("demo").generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
    assert [answer["choices"][0]["token_ids"] for answer in answers] == [
        list(output.outputs[0].token_ids) for output in outputs
    ]
