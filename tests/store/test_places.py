"""What a place is called, from the text alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.store.homes import BucketPlace, DirectoryPlace, parse_place


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/a/b", DirectoryPlace(Path("/a/b"))),
        ("/a/../b/", DirectoryPlace(Path("/b"))),
        ("file:///a/b", DirectoryPlace(Path("/a/b"))),
        ("file://localhost/a/b", DirectoryPlace(Path("/a/b"))),
        ("file:///a%20b/%3Fc", DirectoryPlace(Path("/a b/?c"))),
        # decoded once, as any name may have a percent sign
        ("file:///a%252e", DirectoryPlace(Path("/a%2e"))),
        ("s3://bucket", BucketPlace("bucket", "")),
        ("s3://bucket/", BucketPlace("bucket", "")),
        ("s3://bucket/a/b.jsonl", BucketPlace("bucket", "a/b.jsonl")),
        ("s3://bucket/a/", BucketPlace("bucket", "a")),
        ("s3://bucket/a b?c#d", BucketPlace("bucket", "a b?c#d")),
        ("s3://bucket/a%20b", BucketPlace("bucket", "a%20b")),
        ("s3://bucket/a..b/...", BucketPlace("bucket", "a..b/...")),
    ],
)
def test_a_place_has_a_name(text: str, place: object) -> None:
    assert parse_place(text) == place


@pytest.mark.parametrize(
    "text",
    [
        *("http://host/a", "S3://bucket/a", "://", "s3:///a", "s3://", "s3://buck et/a", "s3://user@host/a"),
        *("s3://bucket/../a", "s3://bucket/a/..", "s3://bucket/./a", "s3://bucket//a", "s3://bucket/a//b"),
        *(
            "s3://bucket/%2e%2e/a",
            "s3://bucket/a/%2E./b",
            "s3://bucket/%252e%252e/a",
            "s3://bucket/a%2f..%2fb",
        ),
        *(
            "s3://bucket/a%5c..%5cb",
            "s3://bucket/..\\a",
            "s3://bucket/a\nb",
            "s3://bucket/a\0",
            "file:///a%00",
        ),
        *(
            "file://host/a",
            "file:a://b",
            "file://",
            "file:///a?b",
            "file:///a#b",
            "file://../a",
            "file:///a%0ab",
        ),
        *("s3://bucket/" + "x" * 1025, "file:///" + "x" * 5000, "s3://" + "b" * 256),
    ],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="^must "):
        parse_place(text)


@given(st.text())
@settings(deadline=None)
def test_any_text_is_a_place_or_refused(text: str) -> None:
    try:
        parse_place(f"s3://bucket/{text}")
        parse_place(f"file:///{text}")
        parse_place(text)
    except ValueError as error:
        assert str(error).startswith("must ")


def test_a_prefix_has_what_is_below_it() -> None:
    prefix = BucketPlace("bucket", "a/b")
    for key, is_in in (("a/b", True), ("a/b/c", True), ("a/bc", False), ("a", False), ("A/b/c", False)):
        assert prefix.has(BucketPlace("bucket", key)) == is_in
    assert BucketPlace("bucket", "").has(prefix) and not BucketPlace("other", "").has(prefix)


@pytest.mark.parametrize(("beginning", "max_bytes"), [("s3://bucket/", 1024), ("/", 4095)])
def test_a_name_may_be_as_long_as_it_may_be(beginning: str, max_bytes: int) -> None:
    parse_place(beginning + max_bytes * "a")
    with pytest.raises(ValueError, match="must have at most"):
        parse_place(beginning + (max_bytes + 1) * "a")
    with pytest.raises(ValueError, match="must have at most"):
        parse_place(beginning + (max_bytes // 2) * "é" + "aa")
