from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.store.s3_process import S3Process, s3_running


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Process]:
    with s3_running() as server:
        yield server


@pytest.fixture
def s3(s3_server: S3Process) -> S3Process:
    """An empty bucket, in a server that is up."""
    s3_server.empty()
    return s3_server
