"""Whether steps go on: learned limits, pauses that come again, rounds, and what is no stall."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.watch.learned_limit import LEAST_S, TIMES_AS_LONG, WARM_UP, LearnedLimit
from resilio_hpc.watch.limit_table import FIRST_LIMIT_S, FIRST_SECTION_S, SILENT_LEAST_S, SILENT_WARM_UP
from resilio_hpc.watch.step_watch import GoesOn, Stalled, StepWatch


class Run:
    """A run whose nodes report the same steps."""

    def __init__(self) -> None:
        self.watch = StepWatch()
        self.now = 100.0
        self.step = 0
        self.calls = -1
        self.section = ""
        self.seen: list[Stalled | GoesOn] = []

    def look(self, round_number: int = 0, ranks: int = 4, expected: bool = True, **steps: int) -> None:
        reported = steps or {"n1": self.step, "n2": self.step}
        found = self.watch.look(round_number, ranks, reported if expected else None, self.now, self.calls, self.section)
        self.seen += [] if found is None else [found]

    def train(self, steps: int, step_s: float) -> None:
        for _ in range(steps):
            self.now += step_s
            self.step += 1
            self.look()

    def wait(self, seconds: float, **options: bool) -> None:
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            self.look(**options)


def test_a_run_that_stops_is_seen_within_its_limit_and_so_is_its_next_step() -> None:
    run = Run()
    run.look()
    run.train(50, 0.05)
    assert run.seen == []
    run.wait(72.0)
    (stalled,) = run.seen
    assert isinstance(stalled, Stalled)
    assert (stalled.step, stalled.nodes, stalled.limit_s) == (50, ("n1", "n2"), LEAST_S)
    assert LEAST_S < stalled.silent_s <= LEAST_S + 0.25
    assert run.watch.stalled_s(run.now) == 72.0
    run.train(1, 0.0)
    (goes_on,) = run.seen[1:]
    assert isinstance(goes_on, GoesOn)
    assert (goes_on.step, goes_on.waited_s) == (51, 72.0)
    assert run.watch.stalled_s(run.now) is None


def test_the_nodes_that_have_done_the_fewest_steps_are_named() -> None:
    run = Run()
    run.look()
    run.train(20, 0.1)
    run.now += 30
    run.look(n1=21, n2=20)
    (stalled,) = run.seen
    assert isinstance(stalled, Stalled)
    assert stalled.nodes == ("n2",)


def test_one_hang_is_not_learned_and_a_pause_is_the_second_time() -> None:
    run = Run()
    run.look()
    for pause, told in ((20.0, 1), (20.0, 2), (20.0, 2), (20.0, 2)):
        run.train(30, 0.1)
        run.wait(pause)
        run.train(1, 0.1)
        assert sum(isinstance(one, Stalled) for one in run.seen) == told


def test_what_is_no_stall() -> None:
    run = Run()
    run.look()
    run.train(WARM_UP - 2, 0.1)
    run.wait(FIRST_LIMIT_S - 1)  # the run's own limit is not known yet
    run.train(30, 0.1)
    run.wait(100.0, expected=False)  # ranks have finished, or were asked to stop
    assert run.seen == []
    run.look(round_number=1)  # another round begins
    run.look(round_number=1, n1=-1, n2=3)  # a node that has not done its first step
    assert run.seen == []


def test_a_run_that_stops_before_its_limit_is_known_is_seen_later() -> None:
    run = Run()
    run.look()
    run.train(3, 0.1)
    run.wait(FIRST_LIMIT_S + 1)
    (stalled,) = run.seen
    assert isinstance(stalled, Stalled)
    assert (stalled.step, stalled.limit_s) == (3, FIRST_LIMIT_S)


def test_a_pause_in_which_calls_go_on_is_no_stall() -> None:
    run = Run()
    run.look()
    run.train(30, 0.1)
    for run.calls in range(200):  # an evaluation
        run.wait(LEAST_S - 0.5)
    assert run.seen == []
    run.wait(LEAST_S + 0.5)
    assert [type(one) for one in run.seen] == [Stalled]


def test_a_section_has_a_limit_of_its_own_which_is_learned() -> None:
    run = Run()
    run.look()
    for seconds, stalls in ((40.0, 0), (50.0, 0), (60.0, 0), (FIRST_SECTION_S - 400, 1)):
        run.train(30, 0.1)
        run.section = "evaluation"
        run.wait(seconds)
        assert sum(isinstance(one, Stalled) for one in run.seen) == stalls
        run.section = ""
        run.look()
    assert [type(one) for one in run.seen] == [Stalled, GoesOn]  # its end is progress
    run.wait(LEAST_S + 1)  # the steps' own limit is what it was
    assert isinstance(run.seen[-1], Stalled)
    assert run.seen[-1].limit_s == LEAST_S


def test_the_first_time_a_section_may_last_for_long() -> None:
    run = Run()
    run.look()
    run.train(30, 0.1)
    run.section = "evaluation"
    run.wait(FIRST_SECTION_S - 1)
    assert run.seen == []
    run.wait(2)
    assert isinstance(run.seen[-1], Stalled)


def test_a_script_that_reports_no_steps_is_seen_by_its_calls() -> None:
    run = Run()
    run.step = -1
    for run.calls in range(SILENT_WARM_UP + 10):
        run.now += 0.05
        run.look()
    assert run.seen == []
    run.wait(SILENT_LEAST_S + 1)
    (stalled,) = run.seen
    assert isinstance(stalled, Stalled)
    assert (stalled.step, stalled.nodes) == (-1, ())
    assert run.watch.silent_s(run.now) > SILENT_LEAST_S


def test_what_is_known_to_stand_still_has_stalled_before_its_limit() -> None:
    run = Run()
    run.train(30, 0.1)
    before = len(run.seen)
    run.now += 1.0
    seen = run.watch.look(0, 4, {"n1": run.step}, run.now, certain=True)
    assert isinstance(seen, Stalled)
    assert seen.silent_s < seen.limit_s
    assert run.seen[before:] == []


def test_another_number_of_ranks_is_learned_from_the_start() -> None:
    run = Run()
    run.look()
    run.train(30, 0.1)
    run.look(round_number=1, ranks=2)
    run.now += 30
    run.look(round_number=1, ranks=2)
    assert run.seen == []


@settings(max_examples=200)
@given(st.lists(st.floats(0.001, 50), min_size=WARM_UP, max_size=60))
def test_the_limit_follows_the_waits_but_for_the_longest(waits: list[float]) -> None:
    limit = LearnedLimit()
    for wait in waits[: WARM_UP - 1]:
        limit.learn(wait)
    assert limit.seconds is None
    for wait in waits[WARM_UP - 1 :]:
        limit.learn(wait)
    assert limit.seconds == max(LEAST_S, TIMES_AS_LONG * sorted(waits)[-2])
    assert limit.seconds <= max(LEAST_S, 5 * max(waits))
