"""The hosts on which `ray up` is tested."""

from __future__ import annotations

import pytest

from tests.deploy.hosts import network, why_not


def test_a_host_in_the_place_of_another_one_is_reached_at_once() -> None:
    if reason := why_not():
        pytest.skip(reason)
    with network({"NAME": "value"}) as net:
        net.add(1).run("true")
        net.hosts[1].destroy()
        # Only the first answer tells: an ARP entry may expire while `add` waits.
        assert net.add(1).run("echo $NAME") == "value\n"
