"""The page's files over HTTP, and that nothing in them leads elsewhere."""

from __future__ import annotations

import re

import pytest

from alignedserve.gateway.page.routes import FOLDER, TYPES
from tests.gateway.http.test_access import KEYED
from tests.gateway.served import Served, SharedGateway, play, served

FILES = sorted(path.name for path in FOLDER.iterdir() if path.suffix in TYPES)


def test_every_file_is_there_with_its_type_and_headers() -> None:
    async def scenario() -> None:
        async with served() as at:
            assert {"index.html", "main.js", "style.css", "icon.svg"} <= set(FILES)
            for name in FILES:
                path = "/" if name == "index.html" else f"/page/{name}"
                answer = await at.http.get(path)
                assert (answer.status_code, answer.content) == (200, (FOLDER / name).read_bytes())
                assert answer.headers["content-type"] == TYPES[f".{name.split('.')[1]}"]
                assert answer.headers["x-content-type-options"] == "nosniff"
                assert answer.headers["referrer-policy"] == "no-referrer"
                assert answer.headers["cache-control"] == "no-cache"
                policy = dict(
                    each.split(" ", 1) for each in answer.headers["content-security-policy"].split("; ")
                )
                assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
                assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"

    play(scenario)


@pytest.mark.parametrize("path", ["/", "/page/main.js"])
def test_what_has_not_changed_is_not_sent_again_and_head_has_no_body(
    path: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        whole = await at.http.get(path)
        head = await at.http.head(path)
        assert (head.status_code, head.content) == (200, b"")
        for name in ("content-length", "content-type", "etag", "content-security-policy"):
            assert head.headers[name] == whole.headers[name]
        again = await at.http.get(path, headers={"If-None-Match": whole.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        other = await at.http.get(path, headers={"If-None-Match": '"other"'})
        assert (other.status_code, other.content) == (200, whole.content)

    gateway.play(scenario)


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/nothing.js",
        "/page/routes.py",
        "/page/__init__.py",
        "/page/..%2Fapp.py",
        "/page/%2e%2e/app.py",
        "/page/..%5Capp.py",
        "/page//etc/passwd",
        "/page/main.js%00",
        "/index.html",
    ],
)
def test_nothing_else_is_served(path: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.http.get(path)
        assert answer.status_code == 404 and "error" in answer.json()

    gateway.play(scenario)


def test_the_page_needs_no_key_and_gives_nothing_else_away() -> None:
    async def scenario() -> None:
        async with served(**KEYED) as at:
            for name in ["", *(f"page/{name}" for name in FILES)]:
                assert (await at.http.get(f"/{name}")).status_code == 200
                assert (await at.http.head(f"/{name}")).status_code == 200
            for method, path in [
                ("POST", "/"),
                ("OPTIONS", "/"),
                ("GET", "/page"),
                ("GET", "/page/a/../../metrics"),
            ]:
                assert (await at.http.request(method, path)).status_code == 401, path
            assert at.router.submitted == []

    play(scenario)


def test_the_description_does_not_mention_it() -> None:
    async def scenario() -> None:
        async with served() as at:
            paths = (await at.http.get("/openapi.json")).json()["paths"]
            assert "/health" in paths and not [
                path for path in paths if path == "/" or path.startswith("/page")
            ]

    play(scenario)


@pytest.mark.parametrize("name", FILES)
def test_files_refer_to_each_other_and_to_nothing_else(name: str) -> None:
    text = (FOLDER / name).read_text()
    named = re.findall(r'(?:from "\./|(?:src|href)="/page/)([^"]+)"', text)
    assert set(named) <= set(FILES)
    assert not re.findall(r"(?:https?:)?//(?!www\.w3\.org/2000/svg)[a-z]", text)
    # of what came from elsewhere nothing becomes HTML or code
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text)
