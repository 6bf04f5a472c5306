"""The file of API keys is read again whenever it changes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignedserve.gateway.config import KeyConfig
from alignedserve.gateway.http.keys import Keys, contents_of, owners_of
from alignedserve.launch import api_keys
from alignedserve.launch.api_keys import REPEAT_S, KeyFile
from alignedserve.launch.console import Alarm
from tests.launch.server import POOL, START_S, serving, until


class Watched:
    """A file of keys, and what its changes have led to."""

    def __init__(self, file: Path, text: str, *given: str, operators: str | None = None) -> None:
        """`operators`: the path of a file of operators' keys."""
        self.file = file
        file.write_text(text)
        self.said: list[str] = []
        self.lists: list[Mapping[bytes, str]] = []
        # What the launcher's clock shows.
        self.now_s = 0.0
        config = KeyConfig(given, str(file), operator_key_file=operators)
        self._reader = KeyFile(
            config, owners_of(*config.lists), self.said.append, self.lists.append, lambda: self.now_s
        )

    def look(self, text: str | None = None) -> None:
        """Twice, as the file counts once it has not changed between two looks."""
        if text is not None:
            self.file.write_text(text)
        self.look_once()
        self.look_once()

    def look_once(self) -> None:
        asyncio.run(self._reader.look())

    def takes(self, key: str) -> bool:
        return Keys(self.lists[-1]).owner(f"Bearer {key}") is not None


def test_a_changed_file_is_a_new_list(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "first\nsecond\n", "given")
    watched.look()
    watched.look("# another order, and nothing else\nsecond\nfirst\n")
    assert watched.lists == [] and watched.said == []
    watched.look("second team\nthird\n")
    assert [watched.takes(key) for key in ("first", "second", "third", "given")] == [False, True, True, True]
    assert watched.said == ["the API keys have changed: 1 added, 1 removed, 1 in another group; 3 in all"]
    watched.look()
    assert len(watched.lists) == 1


def test_operators_keys_change_with_their_own_file(tmp_path: Path) -> None:
    operators = tmp_path / "operators"
    operators.write_text("ours\n")
    watched = Watched(tmp_path / "keys", "first\n", operators=str(operators))
    watched.look()
    operators.write_text("new\n")
    watched.look()
    assert watched.said == ["the API keys have changed: 1 added, 1 removed; 2 in all"]
    assert [watched.takes(key) for key in ("first", "ours", "new")] == [True, False, True]
    operators.write_text("")
    watched.look("second\n")
    assert watched.said[1:] == [
        f"the API keys stay as they are: --operator-key-file {operators}: holds no key"
    ]
    assert watched.takes("first") and watched.takes("new")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"", "holds no key"),
        (b"# no key\n\n", "holds no key"),
        (b"first\nhidden\xff\n", "can't be read"),
        (b"first\nhidd\xc3\xa9n\n", "line 2: a key must be of printable ASCII letters"),
        *(
            (f"first\n# hidden:{control}hidden\n".encode(), "line 2: contains a control character")
            for control in "\0\r\v\f\x1b\x1c\x1d\x1e\x85\u2028\u2029"
        ),
        (b"first\nhidd", "line 2: has no line end, so the file may be cut short"),
        (b"first\n# hidden\n ", "line 3: has no line end"),
        (b"first\n\nhidden a b\n", "line 3: after a key there may be the name of its group"),
        (b"hidden a\nhidden b\n", "line 2: a key is in two groups"),
        (None, "can't be read"),
    ],
)
def test_a_broken_file_changes_nothing_and_is_named_once(
    text: bytes | None, reason: str, tmp_path: Path
) -> None:
    watched = Watched(tmp_path / "keys", "first\n")
    watched.file.unlink() if text is None else watched.file.write_bytes(text)
    for _ in range(3):
        watched.look()
    assert watched.lists == []
    (line,) = watched.said
    assert line.startswith("the API keys stay as they are: ") and reason in line and str(watched.file) in line
    assert "hidd" not in line and "first" not in line
    watched.look("second\n")
    assert watched.takes("second") and not watched.takes("first")
    assert [each.partition(":")[0] for each in watched.said[1:]] == [
        "the file of API keys can be used again",
        "the API keys have changed",
    ]


def test_a_file_that_stays_broken_is_named_again_now_and_then(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "first\n")
    watched.look("")
    for _ in range(3):
        num_said = len(watched.said)
        watched.now_s += REPEAT_S / 2
        watched.look()
        assert len(watched.said) == num_said
        watched.now_s += REPEAT_S / 2
        watched.look()
        assert len(watched.said) == num_said + 1
    assert len({*watched.said}) == 1 and "holds no key" in watched.said[0]
    # The old contents are a new list to no gateway, and end the complaints.
    watched.look("first\n")
    watched.now_s += REPEAT_S
    watched.look()
    assert watched.lists == [] and watched.said[4:] == ["the file of API keys can be used again"]


def test_a_look_that_fails_is_told_and_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever went wrong: without further looks a revoked key would stay valid."""
    monkeypatch.setattr(api_keys, "LOOK_S", 0.0)
    file = tmp_path / "keys"
    file.write_text("first\n")
    said: list[str] = []
    lists: list[Mapping[bytes, str]] = []
    is_there = asyncio.Event()

    def changed(owners: Mapping[bytes, str]) -> None:
        lists.append(owners)
        if len(lists) < 3:
            raise RuntimeError("can't start new thread")
        is_there.set()

    async def scenario() -> None:
        key_file = KeyFile(KeyConfig((), str(file)), owners_of((), str(file)), said.append, changed)
        file.write_text("second\n")
        watching = asyncio.create_task(key_file.watch())
        async with asyncio.timeout(60):
            await is_there.wait()
        watching.cancel()

    asyncio.run(scenario())
    assert lists[0] == lists[2] == owners_of(["second"], None)
    assert said[0] == "the API keys stay as they are: RuntimeError: can't start new thread"


def test_a_file_of_the_same_size_and_times_is_another(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "first\n")
    watched.look()
    times = os.stat(watched.file)
    watched.file.write_text("other\n")
    os.utime(watched.file, ns=(times.st_atime_ns, times.st_mtime_ns))
    watched.look()
    assert watched.takes("other")


def test_a_file_that_is_being_written_is_not_read_yet(tmp_path: Path) -> None:
    """A file may also be cut at the end of a line."""
    watched = Watched(tmp_path / "keys", "first\nsecond\n")
    watched.look()
    watched.file.write_text("third\n")
    watched.look_once()
    watched.file.write_text("third\nsecond\n")
    watched.look_once()
    assert watched.lists == [] and watched.said == []
    watched.look_once()
    assert watched.takes("third") and watched.takes("second") and not watched.takes("sec")


def test_a_pipe_is_refused_and_blocks_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path / "keys", "first\n")
    watched.file.unlink()
    os.mkfifo(watched.file)
    watched.look()
    assert all(isinstance(each, Alarm) for each in watched.said)
    assert watched.said == [
        f"the API keys stay as they are: --api-key-file {watched.file}: is not a regular file"
    ]
    with pytest.raises(ValueError, match="is not a regular file"):
        owners_of((), str(watched.file))
    with pytest.raises(ValueError, match="is not a regular file"):
        owners_of((), str(tmp_path))
    watched.file.unlink()
    watched.look("second\n")
    assert watched.takes("second")


def test_what_is_checked_is_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced while it is read can't add a list that two looks have not seen."""
    watched = Watched(tmp_path / "keys", "first\n")
    read: list[dict[str, bytes]] = []

    def replaced(files: Mapping[str, str]) -> dict[str, bytes]:
        read.append(contents_of(files))
        watched.file.write_text(f"key-{len(read)}\n")
        return read[-1]

    monkeypatch.setattr(api_keys, "contents_of", replaced)
    for _ in range(5):
        watched.look_once()
    assert len(read) == 5 and watched.lists == []


# Its argument is a pipe, of which nothing is written until something was said.
BLOCKED = """
import asyncio
import sys
from pathlib import Path

from alignedserve.gateway.config import KeyConfig
from alignedserve.gateway.http.keys import owners_of
from alignedserve.launch import api_keys

file, pipe, action = sys.argv[1:]
api_keys.READ_S = 0.01
api_keys.LOOK_S = 0.0
contents_of, num_readers = api_keys.contents_of, []
reading = []

def blocked(files):
    reading.append(files)
    num_readers.append(len(reading))
    if len(num_readers) == 1:
        Path(pipe).read_bytes()
    reading.pop()
    return contents_of(files)

api_keys.contents_of = blocked

async def main():
    told, changed = asyncio.Event(), asyncio.Event()

    def say(line):
        print(line, flush=True)
        told.set()

    key_file = api_keys.KeyFile(KeyConfig((), file), owners_of((), file), say, lambda owners: changed.set())
    Path(file).write_text("second\\n")
    watching = asyncio.create_task(key_file.watch())
    await told.wait()
    if action == "unblock":
        Path(pipe).write_bytes(b"")
        await changed.wait()
    assert max(num_readers) == 1, num_readers
    watching.cancel()

asyncio.run(main())
print("ended")
"""


@pytest.mark.parametrize("action", ["end", "unblock"])
def test_a_read_that_blocks_is_told_and_delays_no_end(action: str, tmp_path: Path) -> None:
    """A file on a network that is down. The process ends while the read still blocks, or the next reads are used."""
    file, pipe = tmp_path / "keys", tmp_path / "pipe"
    file.write_text("first\n")
    os.mkfifo(pipe)
    command = [sys.executable, "-c", BLOCKED, str(file), str(pipe), action]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_S)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first == f"the API keys stay as they are: --api-key-file {file}: not read within 0.01 s"
    assert last == "ended"
    assert ("1 added, 1 removed; 1 in all" in done.stdout) == (action == "unblock")


@pytest.mark.slow
def test_every_gateway_refuses_a_revoked_key_and_takes_a_new_one(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sk-before\nsk-stays team\n")
    operator = ("--operator-key", "sk-operator")
    with serving("--gateways", "2", "--api-key-file", str(file), *operator, *POOL) as server:

        def statuses(key: str) -> set[int]:
            """A connection for each call. All calls go to one gateway once in 2^19 times."""
            headers = {"Authorization": f"Bearer {key}"}
            return {
                httpx2.get(f"{server.url}/v1/models", headers=headers, verify=False).status_code
                for _ in range(20)
            }

        assert statuses("sk-before") == statuses("sk-stays") == {200} and statuses("sk-after") == {401}
        file.write_text("sk-after\nsk-stays team\n")
        server.until_said("the API keys have changed: 1 added, 1 removed; 3 in all")
        until(lambda: statuses("sk-before") == {401} and statuses("sk-after") == {200})
        assert statuses("sk-stays") == {200}
        # one that is started again has the new list, too
        killed = {each["instance_id"]: each["pid"] for each in cluster(server.url, "sk-operator")}
        pid = killed["gateway-0"]
        os.kill(pid, 9)
        until(
            lambda: any(
                each["instance_id"] == "gateway-0" and each["pid"] not in (0, pid)
                for each in cluster(server.url, "sk-operator")
            )
        )
        assert statuses("sk-before") == {401} and statuses("sk-after") == {200}
        file.write_text("")
        server.until_said("the API keys stay as they are: .*holds no key")
        assert statuses("sk-after") == {200}
        assert "sk-" not in server.output


def cluster(url: str, key: str) -> list[dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx2.get(f"{url}/v1/cluster", headers=headers, verify=False)
    # A gateway that has just started has no link to the launcher for a moment.
    found: list[dict[str, Any]] = answer.json()["processes"] if answer.status_code == 200 else []
    return found
