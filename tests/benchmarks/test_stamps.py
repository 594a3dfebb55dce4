"""What the stamps of the ranks say about a recovery."""

import pytest

import stamps

LIFE = (*stamps.PHASES.values(), "7")


def life(begun_s: float, events: int = len(LIFE)) -> str:
    """A process that ends an event every second."""
    return "".join(f"{event} {begun_s + index} 0\n" for index, event in enumerate(LIFE[:events]))


def ranks(*texts: str) -> list[list[stamps.Stamp]]:
    return [stamps.parse(text) for text in texts]


def test_the_phases_add_up_to_the_last_rank_s_first_step() -> None:
    phases = stamps.recovery(ranks(life(10) + life(21), life(10) + life(22.5)), killed_at_s=20)
    assert phases is not None
    assert list(phases) == [*stamps.PHASES, "first step"]
    assert phases["stop and start"] == pytest.approx(2.5)
    assert sum(phases.values()) == pytest.approx(7.5)


def test_a_step_that_a_survivor_ended_after_the_kill_is_not_a_recovery() -> None:
    survivor = life(10) + "8 20.5 0\n"
    assert stamps.recovery(ranks(survivor, life(10) + life(21)), killed_at_s=20) is None


def test_a_restart_that_failed_before_its_step_does_not_count() -> None:
    flapped = life(10) + life(21, events=3) + life(31)
    phases = stamps.recovery(ranks(flapped, flapped), killed_at_s=20)
    assert phases is not None
    assert sum(phases.values()) == pytest.approx(16)


def test_a_rank_without_a_step_yet_means_not_recovered() -> None:
    assert stamps.recovery(ranks(life(21), life(21, events=5)), killed_at_s=20) is None
    assert stamps.recovery(ranks(life(21), ""), killed_at_s=20) is None


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert stamps.parse("1 1.5 0\n2 2.") == [stamps.Stamp("1", 1.5)]


def test_steps_are_counted_in_the_newest_process_only() -> None:
    (rank,) = ranks(life(10) + life(20) + "8 27 0\n")
    assert stamps.steps_done(rank) == 2
