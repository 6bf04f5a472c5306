"""Which nodes become islands, and which are let go, as nodes come, go and fail."""

from __future__ import annotations

from alignedserve.launch.node_choice import MAX_RETRY_S, RETRY_S, NodeChoice


def test_nodes_become_islands_as_they_come() -> None:
    choice = NodeChoice()
    assert choice.look(["a", "b"], 0.0) == ({0: "a", 1: "b"}, [])
    assert choice.look(["a", "b"], 1.0) == ({}, [])
    assert choice.look(["c", "a", "b"], 2.0) == ({2: "c"}, [])


def test_a_node_that_goes_makes_room_for_another_and_numbers_are_not_used_again() -> None:
    choice = NodeChoice(most=2)
    assert choice.look(["a", "b", "c"], 0.0) == ({0: "a", 1: "b"}, [])
    assert choice.look(["b", "c"], 1.0) == ({2: "c"}, [0])
    # it is back, and there is no room
    assert choice.look(["a", "b", "c"], 2.0) == ({}, [])
    assert choice.look(["a"], 3.0) == ({3: "a"}, [1, 2])


def test_a_node_whose_island_fails_is_tried_again_later_and_later() -> None:
    choice = NodeChoice()
    choice.look(["a"], 0.0)
    now, pause_s = 100.0, RETRY_S
    while pause_s < MAX_RETRY_S:
        choice.failed(max(choice.chosen), now)
        assert choice.look(["a"], now + pause_s - 0.1) == ({}, [])
        now += pause_s
        come, gone = choice.look(["a"], now)
        assert list(come.values()) == ["a"] and not gone
        pause_s = min(2 * pause_s, MAX_RETRY_S)
    choice.failed(max(choice.chosen), now)
    assert choice.look(["a"], now + MAX_RETRY_S - 0.1) == ({}, [])
    assert choice.look(["a"], now + MAX_RETRY_S)[0]


def test_what_failed_makes_room_for_a_spare_node() -> None:
    choice = NodeChoice(most=1)
    choice.look(["a", "b"], 0.0)
    choice.failed(0, 1.0)
    assert choice.look(["a", "b"], 2.0) == ({1: "b"}, [])


def test_after_it_has_worked_or_was_started_anew_it_is_tried_soon() -> None:
    choice = NodeChoice()
    choice.look(["a"], 0.0)
    choice.failed(0, 0.0)
    choice.look(["a"], RETRY_S)
    choice.worked(1)
    choice.failed(1, 50.0)
    assert choice.look(["a"], 50.0 + RETRY_S) == ({2: "a"}, [])
    choice.look([], 70.0)
    assert choice.look(["a"], 70.0) == ({3: "a"}, [])


def test_a_node_that_goes_while_it_waits_is_forgotten() -> None:
    choice = NodeChoice()
    choice.look(["a"], 0.0)
    choice.failed(0, 0.0)
    choice.failed(0, 0.0)
    assert choice.look([], 1.0) == ({}, [])
    assert choice.look(["a"], 2.0) == ({1: "a"}, [])
