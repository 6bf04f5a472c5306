from __future__ import annotations

import tempfile
from pathlib import Path

from alignedserve.process.private_files import can_others_write


def test_others_can_write_where_they_have_the_right_and_a_way() -> None:
    # where everyone gets to, which pytest's own directories are not
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        outer, inner = Path(name), Path(name) / "inner"
        inner.mkdir()
        for inner_mode, outer_mode, expected in (
            (0o777, 0o755, True),
            (0o777, 0o700, False),
            (0o755, 0o755, False),
            (0o1777, 0o711, True),
        ):
            inner.chmod(inner_mode)
            outer.chmod(outer_mode)
            assert can_others_write(inner) is expected
