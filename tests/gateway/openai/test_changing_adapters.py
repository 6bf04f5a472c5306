"""Routes that change the server for all: adapters that are loaded and unloaded, and the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from alignedserve.engine.config import EngineConfig
from alignedserve.engine.lora_modules import name_of
from alignedserve.gateway.http.keys import owners_of
from alignedserve.gateway.process import GatewayProcess
from alignedserve.launch.adapters import FILES, AdapterKeeper
from alignedserve.launch.gateway_links import GatewayLinks
from alignedserve.launch.ports import free_port
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import AdaptersSet, Rejected, SetAdapters, Submit
from tests.gateway.islands.test_membership import Seen, launcher
from tests.gateway.scripted import MODEL, TOKEN
from tests.gateway.served import GATEWAY, QuickGateway, Served, play, served

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
CHANGES = (LOAD, UNLOAD, "/reset_prefix_cache", "/flush_cache")


@asynccontextmanager
async def changing(
    root: Path, kind: type[GatewayProcess] = QuickGateway, **settings: Any
) -> AsyncIterator[Served]:
    """A gateway with a launcher whose only island loads everything."""
    address = RouterAddress("127.0.0.1", free_port("127.0.0.1"), TOKEN)
    gateway = Seen()
    links = GatewayLinks(address, {GATEWAY: gateway})

    def obey(order: SetAdapters) -> None:
        keeper.obeyed("island", AdaptersSet(order.number))

    engine = EngineConfig("model", max_loras=1)
    links.adapters = keeper = AdapterKeeper(engine, [str(root)], root / "copies", obey, links.tell_all)
    keeper.routers.present.add("island")
    if owners := settings.get("key_owners"):
        links.set_keys(owners)
    await links.listen()
    try:
        model = replace(MODEL, adapters={}, max_model_len=20_000)
        async with served(model=model, kind=kind, launcher=address, **settings) as at:
            await gateway.until(is_up=True)
            yield at
    finally:
        links.close()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    path = tmp_path / "sql"
    path.mkdir()
    for file in FILES:
        (path / file).write_bytes(b"{}")
    return path


@pytest.mark.parametrize("kind", [QuickGateway, pytest.param(GatewayProcess, marks=pytest.mark.slow)])
def test_a_loaded_adapter_is_a_model_until_it_is_unloaded(adapter: Path, kind: type[GatewayProcess]) -> None:
    async def scenario() -> None:
        async with changing(adapter.parent, kind) as at:
            # The real gateway has processes read it, which must know of every change.
            body = {"model": "sql", "prompt": "ab", "max_tokens": 5}
            assert (await at.post("/v1/completions", body)).status_code == 404
            told = {"lora_name": "sql", "lora_path": str(adapter), "is_3d_lora_weight": False}
            answer = await at.post(LOAD, told)
            assert answer.status_code == 200, answer.text
            assert answer.text == "Success: LoRA adapter 'sql' added successfully."
            listed = (await at.http.get("/v1/models")).json()["data"]
            assert [(each["id"], each["parent"]) for each in listed] == [("demo", None), ("sql", "demo")]
            said = await at.post("/v1/completions", body)
            assert said.status_code == 200 and said.json()["model"] == "sql"
            adapters = {each.request.adapter for each in at.router.submitted}
            assert len(adapters) == 1 and name_of(adapters.pop()) == "sql"
            again = await at.post(LOAD, told)
            assert again.status_code == 400 and "load_inplace" in again.json()["error"]["message"]
            assert (await at.post(LOAD, told | {"load_inplace": True})).status_code == 200
            answer = await at.post(UNLOAD, {"lora_name": "sql", "lora_int_id": 1})
            assert answer.text == "Success: LoRA adapter 'sql' removed successfully."
            assert (await at.post("/v1/completions", body)).status_code == 404
            gone = await at.post(UNLOAD, {"lora_name": "sql"})
            assert gone.status_code == 404
            assert gone.json()["error"]["message"] == "The lora adapter 'sql' cannot be found."

    play(scenario)


def test_wrong_bodies_are_refused_before_the_launcher_gets_them(adapter: Path) -> None:
    async def scenario() -> None:
        async with changing(adapter.parent) as at:
            path = str(adapter)
            for wrong in (
                {},
                {"lora_name": "sql"},
                {"lora_name": "", "lora_path": path},
                {"lora_name": "x" * 129, "lora_path": path},
                {"lora_name": "a\nb", "lora_path": path},
                {"lora_name": "demo", "lora_path": path},
                {"lora_name": "sql", "lora_path": 1},
                {"lora_name": "sql", "lora_path": "\0"},
                {"lora_name": "sql", "lora_path": "/etc"},
            ):
                answer = await at.post(LOAD, wrong)
                assert answer.status_code == 400, (wrong, answer.text)
            assert (await at.http.get("/v1/models")).json()["data"][1:] == []

    play(scenario)


def test_only_an_operators_key_changes_anything(adapter: Path) -> None:
    async def scenario() -> None:
        owners = owners_of(["client"], None, ["operator"])
        async with changing(adapter.parent, key_owners=owners) as at:

            async def post(path: str, key: str) -> httpx2.Response:
                body = {"lora_name": "sql", "lora_path": str(adapter)}
                return await at.http.post(path, json=body, headers={"authorization": f"Bearer {key}"})

            for path in CHANGES:
                assert (await post(path, "wrong")).status_code == 401
                refused = await post(path, "client")
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "operator_key_required"
            assert at.router.num_resets == 0
            for path in CHANGES:
                assert (await post(path, "operator")).status_code == 200
            assert at.router.num_resets == 2

    play(scenario)


def test_a_reset_needs_the_router() -> None:
    async def scenario() -> None:
        async with served() as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            assert (await at.http.post("/reset_prefix_cache")).status_code == 200
            assert at.router.num_resets == 1
            at.router.hub.close()
            while (answer := await at.http.post("/reset_prefix_cache")).status_code == 200:
                await asyncio.sleep(0.01)
            assert answer.status_code == 503
            # Nobody loads adapters without a launcher.
            answer = await at.post(UNLOAD, {"lora_name": "sql"})
            assert answer.status_code == 503

    play(scenario)


def test_a_call_that_arrives_at_the_router_too_late_names_no_model() -> None:
    async def scenario() -> None:
        async with served(model=replace(MODEL, adapters={"sql": "sql\n1"})) as at:
            at.router.refuse = lambda submit: Rejected(submit.request.key, "adapter", "it was unloaded")
            answer = await at.post("/v1/completions", {"model": "sql", "prompt": "x"})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (404, "model", "model_not_found")

    play(scenario)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
def test_a_call_that_was_prepared_before_its_adapter_was_replaced_gets_the_new_one(path: str) -> None:
    async def scenario() -> None:
        model = replace(MODEL, adapters={"sql": "sql\n1"})
        async with served(model=model) as at:

            def refuse(submit: Submit) -> Rejected | None:
                if submit.request.adapter == "sql\n2":
                    return None
                model.set_adapters({"sql": "sql\n2"})
                return Rejected(submit.request.key, "adapter", "it was unloaded")

            at.router.refuse = refuse
            answer = await at.post(path, {"model": "sql", "prompt": "x", "input": "x"})
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "sql"
            assert [each.request.adapter for each in at.router.submitted] == ["sql\n1", "sql\n2"]

    play(scenario)


def test_several_machines_load_no_adapters_and_their_gateways_stay_connected() -> None:
    async def scenario() -> None:
        async with launcher() as launched, served(launcher=launched.address) as at:
            await launched.gateway.until(is_up=True)
            for path in (LOAD, UNLOAD):
                answer = await at.post(path, {"lora_name": "sql", "lora_path": "/adapters/sql"})
                assert answer.status_code == 400 and "on one machine only" in answer.text
            assert launched.gateway.is_up

    play(scenario)
