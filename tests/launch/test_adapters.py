"""The launcher's list of adapters, with routers and gateways that answer as a test wants."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import name_of
from alignedserve.launch.adapters import FILES, AdapterKeeper
from alignedserve.protocol.messages import (
    AdaptersChanged,
    AdaptersSet,
    ChangeAdapters,
    ServedAdapters,
    SetAdapters,
)
from alignedserve.types import InstanceId

GATEWAY = InstanceId("gateway-0")


class System:
    """An island and a gateway."""

    def __init__(self, root: Path, max_loras: int = 2, modules: tuple[str, ...] = ()) -> None:
        engine = EngineConfig("model", max_loras=max_loras, lora_modules=modules)
        self.root = root / "allowed"
        self.root.mkdir()
        self.copies = root / "copies"
        self.keeper = AdapterKeeper(engine, [str(self.root)], self.copies, self._order, self._serve)
        # Why no instance can load more than it has; empty: it can.
        self.reason = ""
        self.kept: list[str] = []
        # What the router and the gateway were sent, in order.
        self.sent: list[SetAdapters | ServedAdapters] = []
        self.is_silent = False
        self.keeper.routers.present.add("island")
        self.keeper.gateways.present.add(GATEWAY)

    def _order(self, order: SetAdapters) -> None:
        self.sent.append(order)
        if not self.is_silent:
            self.obey(order)

    def obey(self, order: SetAdapters) -> None:
        reason, self.reason = self.reason, ""
        self.keeper.obeyed("island", AdaptersSet(order.number, reason, self.kept))

    def _serve(self, served: ServedAdapters) -> None:
        self.sent.append(served)
        self.keeper.gateways.answered(GATEWAY, served.number)

    def adapter(self, name: str, content: bytes = b"") -> Path:
        directory = self.root / name
        directory.mkdir(exist_ok=True)
        for file in FILES:
            (directory / file).write_bytes(content or name.encode())
        return directory

    async def load(self, name: str, path: Path | str, is_in_place: bool = False) -> AdaptersChanged:
        return await self.keeper.change(ChangeAdapters(1, name, str(path), is_in_place))

    async def unload(self, name: str) -> AdaptersChanged:
        return await self.keeper.change(ChangeAdapters(1, name))

    @property
    def names(self) -> list[str]:
        return list(self.keeper.served.adapters)

    @property
    def num_copies(self) -> int:
        return len(list(self.copies.iterdir())) if self.copies.exists() else 0


def play(root: Path, scenario: Callable[[System], Awaitable[None]], max_loras: int = 2) -> None:
    async def within_time() -> None:
        async with asyncio.timeout(60):
            await scenario(System(root, max_loras))

    asyncio.run(within_time())


def test_gateways_list_an_adapter_after_all_instances_have_it(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        assert await at.load("sql", at.adapter("sql")) == AdaptersChanged(1, 200)
        ordered, served = at.sent
        assert isinstance(ordered, SetAdapters) and isinstance(served, ServedAdapters)
        (adapter,) = ordered.adapters
        assert served.adapters == {"sql": adapter.adapter} and name_of(adapter.adapter) == "sql"
        assert {file.name for file in Path(adapter.path).iterdir()} == {*FILES}
        # It is read no more: the caller may write the next one there.
        assert not Path(adapter.path).is_relative_to(at.root)
        at.sent.clear()
        assert (await at.unload("sql")).status == 200
        served, ordered = at.sent
        assert isinstance(ordered, SetAdapters) and isinstance(served, ServedAdapters)
        assert served.adapters == {} and ordered.adapters == []
        assert at.num_copies == 0

    play(tmp_path, scenario)


def test_everything_is_as_before_when_an_instance_can_not_load_it(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        at.reason = f"{at.copies} is of another model"
        answer = await at.load("sql", at.adapter("sql"))
        assert answer.status == 400 and "is of another model" in answer.reason
        assert [each.adapters for each in at.sent if isinstance(each, SetAdapters)][-1] == []
        assert at.names == [] and at.num_copies == 0
        assert (await at.load("sql", at.adapter("sql"))).status == 200

    play(tmp_path, scenario)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_an_adapter_is_not_loaded_without_a_router(tmp_path: Path, when: str) -> None:
    async def scenario(at: System) -> None:
        if when == "before":
            at.keeper.lost("island")
            answer = await at.load("sql", at.adapter("sql"))
        else:
            at.is_silent = True
            loading = asyncio.create_task(at.load("sql", at.adapter("sql")))
            while not at.sent:
                await asyncio.sleep(0.01)
            at.keeper.lost("island")
            answer = await loading
        assert answer.status == 400 and "router" in answer.reason
        # The next one gets the list without it.
        assert at.keeper.order and at.keeper.order.adapters == []
        assert at.names == []

    play(tmp_path, scenario)


def test_a_name_stands_for_other_weights_only_in_place(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        path = at.adapter("sql")
        await at.load("sql", path)
        first = at.keeper.served.adapters["sql"]
        again = await at.load("sql", path)
        assert again.status == 400 and "has already been loaded" in again.reason
        at.sent.clear()
        # The same weights are the same adapter.
        assert (await at.load("sql", path, is_in_place=True)).status == 200 and not at.sent
        at.kept = [first]
        assert (await at.load("sql", at.adapter("sql", b"new"), is_in_place=True)).status == 200
        second = at.keeper.served.adapters["sql"]
        assert second != first and name_of(second) == "sql"
        both, served, alone = at.sent
        assert isinstance(both, SetAdapters) and isinstance(alone, SetAdapters)
        assert [each.adapter for each in both.adapters] == [first, second]
        assert served == at.keeper.served.__class__(served.number, {"sql": second})
        assert [each.adapter for each in alone.adapters] == [second]
        # Instances that connect may still need the first one's files.
        assert at.num_copies == 2
        at.kept = []
        at.obey(alone)
        while at.num_copies != 1:
            await asyncio.sleep(0.01)

    play(tmp_path, scenario)


@pytest.mark.parametrize("is_full", [False, True])
def test_a_copy_that_can_not_be_written_is_no_mistake_of_the_caller(tmp_path: Path, is_full: bool) -> None:
    async def scenario(at: System) -> None:
        path = at.adapter("sql")
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        if is_full:
            (path / "adapter_model.safetensors").write_bytes(bytes(2 << 20))
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        else:
            at.copies.write_text("not a directory")
        try:
            answer = await at.load("sql", path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert answer.status == 500
        assert ("File too large" if is_full else "File exists") in answer.reason
        if not is_full:
            at.copies.unlink()
        assert at.num_copies == 0 and not at.sent
        assert (await at.load("sql", path)).status == 200

    play(tmp_path, scenario)


def test_there_are_no_more_adapters_than_allowed(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        for name in ("a", "b"):
            assert (await at.load(name, at.adapter(name))).status == 200
        answer = await at.load("c", at.adapter("c"))
        assert answer.status == 400 and "max_loras=2" in answer.reason
        assert (await at.unload("a")).status == 200
        assert (await at.load("c", at.adapter("c"))).status == 200
        assert at.names == ["b", "c"] and at.num_copies == 2
        assert (await at.unload("a")).status == 404

    play(tmp_path, scenario)


def test_changes_are_made_one_after_the_other(tmp_path: Path) -> None:
    async def scenario(at: System) -> None:
        answers = await asyncio.gather(
            *(at.load("sql", at.adapter("sql")) for _ in range(3)), at.unload("sql"), at.unload("sql")
        )
        assert [each.status for each in answers] == [200, 400, 400, 200, 404]
        assert at.names == [] and at.num_copies == 0

    play(tmp_path, scenario)


def test_no_file_outside_the_named_directories_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(at: System) -> None:
        outside = tmp_path / "outside"
        outside.mkdir()
        for file in FILES:
            (outside / file).write_text("secret")
        linked = at.root / "linked"
        linked.symlink_to(outside)
        files = at.root / "files"
        files.mkdir()
        for file in FILES:
            (files / file).symlink_to(outside / file)
        same_start = tmp_path / "allowed-not"
        same_start.mkdir()
        monkeypatch.chdir(at.root)
        for path in (outside, linked, files, same_start, at.root / ".." / "outside", "sql", "../outside"):
            answer = await at.load("sql", path)
            assert answer.status == 400 and "only from below" in answer.reason, path
        pipe = at.adapter("pipe")
        (pipe / "adapter_config.json").unlink()
        os.mkfifo(pipe / "adapter_config.json")
        for path in (at.root / "none", at.root, pipe):
            assert (await at.load("sql", path)).status == 404
        answer = await at.load("sql", f"{at.root}/\0")
        assert answer.status == 400 and "null byte" in answer.reason
        large = at.adapter("large", b"x" * ((1 << 20) + 1))
        answer = await at.load("sql", large)
        assert answer.status == 400 and "more than 1048576 bytes" in answer.reason
        assert not at.sent and at.num_copies == 0
        # A link within the directory is followed, as the Hugging Face cache has them.
        inside = at.root / "inside"
        inside.mkdir()
        for file in FILES:
            (inside / file).symlink_to(at.adapter("sql") / file)
        assert (await at.load("sql", inside)).status == 200

    play(tmp_path, scenario)


def test_without_reserved_memory_adapters_are_loaded_at_the_start_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        at = System(tmp_path, max_loras=0, modules=("mine=/adapters/mine",))
        assert at.keeper.order is None and at.names == ["mine"]
        answer = await at.load("sql", at.adapter("sql"))
        assert answer.status == 400 and "--max-loras" in answer.reason
        assert (await at.unload("mine")).status == 404
        assert not at.sent

    asyncio.run(scenario())
