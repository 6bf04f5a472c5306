"""Request ids, in and out and in the logs."""

from __future__ import annotations

import io
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from alignedserve.gateway.http.keys import digest_of, owners_of
from alignedserve.process.logs import LogConfig, request_id, set_up_logging
from tests.gateway.observed import observed
from tests.gateway.served import play

GIVEN = {"X-Request-Id": "trace-1.a:b"}


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    written, root = io.StringIO(), logging.getLogger()
    before, level = list(root.handlers), root.level
    set_up_logging("json", to=written)
    yield written
    root.handlers[:] = before
    root.setLevel(level)


def lines(log: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.getvalue().splitlines()]


def test_an_id_that_is_given_comes_back_and_any_other_is_made() -> None:
    async def scenario() -> None:
        async with observed() as at:
            assert (await at.chat(GIVEN)).headers["x-request-id"] == GIVEN["X-Request-Id"]
            ids = set()
            for bad in (b"", b"a b", b"x" * 129, "ä".encode(), b'a"}'):
                answer = await at.http.get("/health", headers=[(b"X-Request-Id", bad)])
                ids.add(answer.headers["x-request-id"])
            assert len(ids) == 5 and all(len(each) == 32 for each in ids)

    play(scenario)


def test_every_answer_has_one() -> None:
    async def scenario() -> None:
        async with observed() as at:
            for answer in (
                await at.http.get("/nowhere"),
                await at.http.delete("/v1/models"),
                await at.chat(top_p=9),
                await at.chat(stream=True),
            ):
                assert answer.headers["x-request-id"], answer

    play(scenario)


def test_a_call_is_one_line_and_says_nothing_that_the_client_said(log: io.StringIO) -> None:
    async def scenario() -> None:
        async with observed() as at:
            await at.chat(GIVEN, user="somebody", stream=True)
            await at.http.get("/v1/models/secret-model", headers={"Authorization": "Bearer secret"})
            for path in ("/health", "/metrics", "/v1/cluster", "/", "/page/main.js"):
                assert (await at.http.get(path)).status_code == 200

    play(scenario)
    said = lines(log)
    assert [(each["path"], each["status"]) for each in said] == [
        ("/v1/chat/completions", 200),
        ("/v1/models/{name:path}", 404),
    ]
    assert said[0]["request_id"] == GIVEN["X-Request-Id"] and said[0]["level"] == "info"
    for word in ("How far", "one", "somebody", "secret", "demo"):
        assert word not in log.getvalue()


def test_the_line_of_a_call_has_its_class_its_tokens_and_the_name_of_its_key(log: io.StringIO) -> None:
    usages: list[dict[str, int]] = []

    async def scenario() -> None:
        async with observed(
            key_owners=owners_of(["secret"], None) | {digest_of("other"): "group:team"}
        ) as at:
            for key, tier in (("secret", "auto"), ("other", "flex")):
                headers = {"Authorization": f"Bearer {key}"}
                answer = await at.chat(headers, n=2, service_tier=tier)
                usages.append(answer.json()["usage"])
            assert (await at.chat({"Authorization": "Bearer unknown"})).status_code == 401

    play(scenario)
    first, second, refused = lines(log)
    for line, usage in zip((first, second), usages, strict=True):
        assert line["completion_tokens"] == usage["completion_tokens"] > 0
        # once for each choice
        assert line["prompt_tokens"] == 2 * usage["prompt_tokens"] > 0
    assert first["class"] == "rt"
    # printf %s secret | sha256sum | cut -c 1-8
    assert first["key"] == "key:2bb80d53"
    assert (second["class"], second["key"]) == ("be", "group:team")
    assert "class" not in refused and "key" not in refused
    assert "secret" not in log.getvalue() and "unknown" not in log.getvalue()


def test_a_path_that_no_route_has_is_logged_bounded_and_escaped(log: io.StringIO) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    set_up_logging("text", to=written)

    async def scenario() -> None:
        async with observed(allowed_hosts=("here",)) as at:
            for path in (
                "/v1/v1/chat/completions?key=secret",
                "/a%0a2026%1b[2J%20status=200",
                "/" + "x" * 5000,
            ):
                assert (await at.http.get(path)).status_code == 404
            assert (await at.http.get("/v1/models/secret-model")).status_code == 404
            answer = await at.http.get("/v1/models", headers={"Host": "elsewhere"})
            assert answer.status_code == 403

    play(scenario)
    handler.close()
    known, forged, long, model, host = written.getvalue().splitlines()
    assert " path=/v1/v1/chat/completions status=404 " in known
    assert " path='/a\\\\n2026\\\\x1b[2J status=200' status=404 " in forged
    assert len(long) < 400
    assert " path=/v1/models/{name:path} status=404 " in model
    assert " path=/v1/models status=403 " in host
    assert "secret" not in written.getvalue()


def test_an_exception_stays_one_line(log: io.StringIO) -> None:
    token = request_id.set("r-1")
    try:
        raise RuntimeError("broken\nin two")
    except RuntimeError:
        logging.getLogger("alignedserve.x").exception("failed", extra={"fields": {"instance": "decode-0"}})
    finally:
        request_id.reset(token)
    (line,) = lines(log)
    assert (line["message"], line["request_id"], line["instance"]) == ("failed", "r-1", "decode-0")
    assert "broken\nin two" in str(line["exception"])


def test_what_breaks_is_logged_once_with_its_id(log: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("out of order")

    async def scenario() -> None:
        async with observed() as at:
            monkeypatch.setattr("alignedserve.gateway.openai.models._model_body", broken)
            answer = await at.http.get("/v1/models", headers=GIVEN)
            assert (answer.status_code, answer.headers["x-request-id"]) == (500, GIVEN["X-Request-Id"])

    play(scenario)
    failed, answered = lines(log)
    assert (failed["message"], failed["request_id"]) == ("failed", GIVEN["X-Request-Id"])
    assert "out of order" in str(failed["exception"]) and answered["status"] == 500


def test_a_file_of_its_own(log: io.StringIO, tmp_path: Path) -> None:
    path = tmp_path / "gateway.log"
    LogConfig("json", dir=str(tmp_path)).start("gateway")
    logging.getLogger("alignedserve.gateway").info("here")
    logging.getLogger("alignedserve.gateway").debug("not at this level")
    (line,) = path.read_text().splitlines()
    assert json.loads(line)["message"] == "here"


def test_no_text_from_elsewhere_forges_a_line_or_steers_a_terminal(log: io.StringIO) -> None:
    """Not in a message, a field or an exception."""
    forged = "2026-01-01T00:00:00.000Z WARNING router [-] all is well"
    told = f"x\n{forged}\r{forged}\x1b[2J\x9b\u2028\u202e\ud800 status=200"
    # pytest's own handlers would put the lone surrogate into its report, which pytest-xdist can't send
    logging.getLogger().handlers.clear()
    written, as_json = io.StringIO(), io.StringIO()
    for form, to in (("text", written), ("json", as_json)):
        set_up_logging(form, to=to)
        named = logging.getLogger("alignedserve.protocol")
        try:
            raise ValueError(told)
        except ValueError:
            named.exception("refused: %s", told, extra={"fields": {"name": told, "long": "y" * 100_000}})
    lines = written.getvalue().split("\n")
    assert all(line.isprintable() for line in lines)
    assert [line for line in lines if line and not line.startswith("    ")] == lines[:1]
    assert "refused: x\\n2026" in lines[0] and " name='x\\\\n" in lines[0] and len(lines[0]) < 20_000
    (line,) = as_json.getvalue().splitlines()
    assert line.isascii() and json.loads(line)["message"] == f"refused: {told}"


def test_log_files_are_not_for_others_and_not_where_others_write(log: io.StringIO, tmp_path: Path) -> None:
    directory = tmp_path / "logs"
    before = os.umask(0)
    try:
        LogConfig(dir=str(directory)).start("gateway", has_console=False)
    finally:
        os.umask(before)
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "gateway.log").stat().st_mode) == 0o600
    directory.chmod(0o777)
    with pytest.raises(OSError, match="other users of this machine can write in it"):
        LogConfig(dir=str(directory)).start("gateway", has_console=False)


def test_text_is_for_people(log: io.StringIO) -> None:
    written = io.StringIO()
    set_up_logging("text", to=written)
    logging.getLogger("alignedserve.router.server").warning(
        "cut off", extra={"fields": {"instance": "decode-0"}}
    )
    assert written.getvalue().endswith("WARNING alignedserve.router.server [-] cut off instance=decode-0\n")
    assert not log.getvalue(), "set up anew, not twice"
