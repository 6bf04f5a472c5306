"""Which versions may be in one system."""

from __future__ import annotations

import pytest

from alignedserve.protocol.versions import work_together


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("0.1.0", "0.1.0", True),
        ("0.1.0", "0.1.12", True),
        ("1.4.2", "1.4.0rc1", True),
        ("1.4.2", "1.4.3+local", True),
        ("0.1.0", "0.2.0", False),
        ("1.4.0", "1.5.0", False),
        ("1.4.0", "2.4.0", False),
        ("1.4.0", "1.41.0", False),
        ("0.1.0", "", False),
        ("0.1.0", "latest", False),
    ],
)
def test_versions_that_differ_in_the_third_number_work_together(one: str, other: str, expected: bool) -> None:
    assert work_together(one, other) == work_together(other, one) == expected
