"""What both ends must have in common before they exchange blocks: model, dtype, block format, layout, transport."""

from __future__ import annotations

from collections.abc import Mapping

Fingerprint = Mapping[str, str]


def differences(ours: Fingerprint, theirs: Fingerprint, we: str, they: str) -> str:
    """Returns the differences as text, empty if there are none."""
    names = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    return "; ".join(
        f"{name} is {_value(ours, name)} at {we} and {_value(theirs, name)} at {they}" for name in names
    )


def _value(fingerprint: Fingerprint, name: str) -> str:
    return repr(fingerprint[name]) if name in fingerprint else "not given"
