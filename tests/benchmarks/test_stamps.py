"""What the stamps of four ranks say about a recovery."""

import pytest

import stamps

LIFE = ("started", "imported", "joined", "restored", "step")


def life(begun_s: float, pid: int, events: int = len(LIFE)) -> str:
    """A process that ends an event every second."""
    return "".join(f"{begun_s + index} {event} 7 {pid}\n" for index, event in enumerate(LIFE[:events]))


def ranks(*texts: str) -> list[list[stamps.Stamp]]:
    return [stamps.parse(text) for text in texts]


def test_the_phases_add_up_to_the_last_rank_s_first_step() -> None:
    phases = stamps.recovery(ranks(life(10, 1) + life(21, 3), life(10, 2) + life(22.5, 4)), killed_at_s=20)
    assert phases is not None
    assert list(phases) == list(stamps.PHASES)
    assert phases["stop and start"] == pytest.approx(2.5)
    assert sum(phases.values()) == pytest.approx(6.5)


def test_a_step_that_a_survivor_ended_after_the_kill_is_not_a_recovery() -> None:
    survivor = life(10, 1) + "20.5 step 8 1\n"
    assert stamps.recovery(ranks(survivor, life(10, 2) + life(21, 3)), killed_at_s=20) is None


def test_a_restart_that_failed_before_its_step_does_not_count() -> None:
    flapped = life(10, 1) + life(21, 2, events=3) + life(31, 3)
    phases = stamps.recovery(ranks(flapped, flapped), killed_at_s=20)
    assert phases is not None
    assert sum(phases.values()) == pytest.approx(15)


def test_a_rank_without_a_step_yet_means_not_recovered() -> None:
    assert stamps.recovery(ranks(life(21, 1), life(21, 2, events=4)), killed_at_s=20) is None
    assert stamps.recovery(ranks(life(21, 1), ""), killed_at_s=20) is None


def test_a_line_that_is_being_written_is_left_out() -> None:
    assert stamps.parse("1.5 step 1 9\n2.5 st") == [stamps.Stamp(1.5, "step", 1, 9)]


def test_steps_are_counted_in_the_newest_process_only() -> None:
    (rank,) = ranks(life(10, 1) + life(20, 2) + "25 step 8 2\n")
    assert stamps.steps_done(rank) == 2
