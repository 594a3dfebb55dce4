"""How often somebody is told."""

from __future__ import annotations

from resilio_hpc.launch.notify.events import Notice
from resilio_hpc.launch.notify.rate import LONGEST_PAUSE_S, Throttle


def failure(number: int, event: str = "failure") -> Notice:
    return Notice(event, float(number), f"event {number}")


VERDICT = Notice("verdict", 0.0, "gave up")


def test_the_first_event_goes_at_once_and_a_storm_is_one_summary_a_second_later() -> None:
    throttle = Throttle()
    throttle.add(failure(0))
    first = throttle.take(1000.0)
    for number in range(1, 301):
        throttle.add(failure(number, "node_lost" if number % 3 == 0 else "failure"))
    assert first is not None and first.text == "event 0"
    assert throttle.take(1000.9) is None
    rest = throttle.take(1001.0)
    assert rest is not None and (rest.event, rest.count) == ("summary", 300)
    lines = rest.text.splitlines()
    assert lines[0] == "300 events: 200 failures, 100 lost nodes"
    assert lines[1:] == [*(f"- event {number}" for number in range(1, 6)), "- … and 294 more", "- event 300"]
    assert throttle.empty and throttle.take(2000.0) is None


def test_a_storm_of_hours_is_one_message_a_minute() -> None:
    throttle, sent = Throttle(), 0
    for tick in range(2 * 3600 * 10):  # ten events a second for two hours
        throttle.add(failure(tick))
        sent += throttle.take(1000.0 + tick / 10) is not None
    assert 100 < sent < 130


def test_a_quiet_time_ends_the_caution() -> None:
    throttle, now = Throttle(), 1000.0
    for number in range(20):
        throttle.add(failure(number))
        while throttle.take(now) is None:
            now += 0.5
    throttle.add(failure(98))
    assert throttle.take(now + 1.0) is None, "the pauses have grown"
    assert throttle.take(now + LONGEST_PAUSE_S) is not None
    now += 3 * LONGEST_PAUSE_S
    for number in (99, 100):
        throttle.add(failure(number))
        assert throttle.take(now) is not None
        now += 1.0


def test_a_few_events_are_told_whole() -> None:
    throttle = Throttle()
    for number in range(6):
        throttle.add(failure(number, "recovered"))
    told = throttle.take(1000.0)
    assert told is not None
    assert told.text == "\n".join(["6 events: 6 recoveries", *(f"- event {number}" for number in range(6))])


def test_the_verdict_is_a_message_of_its_own_after_all_others_and_waits_for_no_pause_at_the_end() -> None:
    throttle = Throttle()
    throttle.add(failure(0))
    assert throttle.take(1000.0) is not None
    throttle.add(VERDICT)
    throttle.add(failure(1))
    throttle.add(failure(2))
    assert throttle.take(1000.1) is None
    last = [throttle.take(1000.1, at_once=True), throttle.take(1000.1, at_once=True)]
    assert [told.event if told else None for told in last] == ["summary", "verdict"]
    assert throttle.empty
