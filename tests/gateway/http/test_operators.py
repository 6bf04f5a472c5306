"""Who may read the counts of all clients, and who may change the server for all."""

from __future__ import annotations

from pathlib import Path

import httpx2
import pytest
from fastapi import FastAPI, Request

from alignedserve.gateway.http.access import Access, AuthLimitsMiddleware, require_operator
from alignedserve.gateway.http.errors import add_error_handlers
from alignedserve.gateway.http.keys import Keys, digest_of, is_operator, name_of, owners_of
from alignedserve.gateway.http.reading import BodyMemory
from tests.gateway.http.test_access import listening_on
from tests.gateway.served import play, served

COUNTERS = ("/metrics", "/v1/cluster")
ONE, OTHER, OPERATOR = owners_of(["one"], None), owners_of(["other"], None), owners_of((), None, ["operator"])


def bearer(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@pytest.mark.parametrize(
    ("owners", "key", "is_shown"),
    [
        ({}, None, True),
        (ONE, "one", True),
        ({digest_of("one"): "group:team", digest_of("other"): "group:team"}, "other", True),
        (ONE | OTHER, "one", False),
        (ONE | OPERATOR, "one", False),
        (ONE | OPERATOR, "operator", True),
        (ONE | OTHER | OPERATOR, "operator", True),
        (OPERATOR, "operator", True),
    ],
)
def test_counts_of_all_are_shown_to_operators_and_to_an_only_owner(
    owners: dict[bytes, str], key: str | None, is_shown: bool
) -> None:
    async def scenario() -> None:
        async with served(key_owners=owners) as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            for path in COUNTERS:
                answer = await at.http.get(path, headers=bearer(key))
                assert answer.status_code == (200 if is_shown else 403), path
                if not is_shown:
                    error = answer.json()["error"]
                    assert "--operator-key" in error["message"] and error["code"] == "operator_key_required"
            # each of them is a client, too
            asked = await at.http.post("/v1/completions", json={"prompt": "x"}, headers=bearer(key))
            assert asked.status_code == 200
            assert (await at.http.get("/v1/models", headers=bearer("wrong"))).status_code == (
                401 if owners else 200
            )

    play(scenario)


@pytest.mark.parametrize(
    ("owners", "key", "is_on_loopback", "status"),
    [
        ({}, None, True, 204),
        ({}, None, False, 403),
        (ONE, "one", True, 403),
        (ONE | OPERATOR, "one", True, 403),
        (ONE | OPERATOR, "operator", False, 204),
    ],
)
def test_only_an_operator_changes_the_server_for_all(
    owners: dict[bytes, str], key: str | None, is_on_loopback: bool, status: int
) -> None:
    app = FastAPI()

    @app.post("/change", status_code=204)
    async def change(http: Request) -> None:
        require_operator(http)

    add_error_handlers(app)
    access = Access(BodyMemory(1 << 20, 1.0), keys=Keys(owners), is_on_loopback=is_on_loopback)
    app.add_middleware(AuthLimitsMiddleware, router=app.router, public=(), access=access)

    async def scenario() -> None:
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1"
        ) as http:
            answer = await http.post("/change", headers=bearer(key))
            assert answer.status_code == status
            assert status == 204 or "--operator-key" in answer.json()["error"]["message"]

    play(scenario)


def test_operators_have_files_of_keys_and_groups_of_their_own(tmp_path: Path) -> None:
    clients, operators = tmp_path / "clients", tmp_path / "operators"
    clients.write_text("first team\n")
    operators.write_text("# ours\nsecond team\nthird\n")
    owners = owners_of((), str(clients), ["fourth"], str(operators))
    keys = Keys(owners)
    found = {key: keys.owner(f"Bearer {key}") or "" for key in ("first", "second", "third", "fourth")}
    assert [is_operator(owner) for owner in found.values()] == [False, True, True, True]
    assert len(set(found.values())) == 4
    assert keys.num_owners == 1
    assert name_of(found["second"]) == "operator:group:team"
    assert name_of(found["third"]) == f"operator:key:{digest_of('third').hex()[:8]}"
    operators.write_text("first\n")
    with pytest.raises(ValueError, match=f"operator_key_file='{operators}', line 1: a key is in two groups"):
        owners_of((), str(clients), (), str(operators))
    operators.write_text("\n")
    with pytest.raises(ValueError, match=f"operator_key_file='{operators}': holds no key"):
        owners_of((), str(clients), (), str(operators))


def test_a_key_that_becomes_the_only_one_does_not_read_counts_of_others() -> None:
    """They have been counted until then."""
    team = {digest_of("first"): "group:team"}
    keys = Keys(team)
    keys.change({digest_of("second"): "group:team"})
    assert keys.may_read_counters("group:team")
    keys.change(team | OTHER)
    keys.change(team)
    assert not keys.may_read_counters("group:team")
    replaced = Keys(ONE)
    replaced.change(OTHER)
    [other] = OTHER.values()
    assert not replaced.may_read_counters(other)
    replaced.change(OTHER | OPERATOR)
    [operator] = OPERATOR.values()
    assert replaced.may_read_counters(operator) and not replaced.may_read_counters(other)


def test_an_operators_key_is_a_key_for_the_start_and_is_not_shown() -> None:
    assert "sesame" not in repr(listening_on("0.0.0.0", operator_key=("sesame",)))  # noqa: S104
