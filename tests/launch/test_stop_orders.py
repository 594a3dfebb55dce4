"""An order to stop holds, whatever dies meanwhile; agents that nobody can hear of are not waited for."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from resilio_hpc.launch.supervisor.agent_signals import STOP_AGAIN_S, STOP_LIMIT_S
from tests.support.launch.keeper_bench import Bench, bench

__all__ = ["bench"]


def test_a_stop_order_holds_for_agents_that_start_later(bench: Callable[..., Bench]) -> None:
    b = bench(2)
    told: list[str] = []
    b.keeper.signals._signal_agents = told.append  # type: ignore[method-assign]
    b.until(lambda: sorted(b.started()) == ["n1", "n2"])
    b.keeper.signals.stop_in_order(b.now)
    b.keeper.signals.stop_in_order(b.now)
    assert told == ["TERM"]
    b.kill("n2")
    b.until(lambda: b.started().count("n2") == 2)
    assert b'"stop":"TERM"' in (b.path / "argv").read_bytes().splitlines()[-1]
    b.tick(STOP_AGAIN_S)
    assert told == ["TERM", "TERM"]
    assert not b.keeper.signals.stop_overdue(b.now)
    for node in ("n1", "n2"):
        b.kill(node)
    b.until(lambda: not b.tick())  # one more agent could bring nothing to a good end
    assert b.started().count("n1") == 1
    assert b.keeper.signals.stop_overdue(b.now + STOP_LIMIT_S + 10.0)


def test_only_a_second_order_to_stop_kills_at_once(bench: Callable[..., Bench]) -> None:
    b = bench(1)
    b.keeper.signals._signal_agents = lambda _name: None  # type: ignore[method-assign]
    b.keeper.signals._received = [signal.SIGUSR1, signal.SIGINT]  # the first one only warned
    b.keeper.signals.forward()
    assert b.keeper.signals.stop_order == "INT"
    b.keeper.signals._received = [signal.SIGINT]
    with pytest.raises(KeyboardInterrupt):
        b.keeper.signals.forward()


def test_an_agent_that_ended_in_order_is_not_awaited_where_the_run_directory_is_gone(
    bench: Callable[..., Bench],
) -> None:
    b = bench(1)
    b.ending(0)
    b.files.gone = True
    b.until(lambda: not b.tick())
    assert b.started() == ["n1"]
