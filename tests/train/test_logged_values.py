"""``run.log``: values reach the agent at most once a second, whatever they are, and nothing is waited for."""

from __future__ import annotations

import math
import socket
from typing import Any

import msgspec
import pytest
import torch

from resilio_hpc.ckpt.coordination.agent_link import AgentLink
from resilio_hpc.ckpt.coordination.coordinator import Place
from resilio_hpc.core.rank_link import Attach, StepDone, ValuesLogged, to_agent
from resilio_hpc.train.logged_values import LoggedValues
from resilio_hpc.train.run import Run


class Ticks:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Ticks:
    return Ticks()


@pytest.fixture
def sent() -> list[ValuesLogged]:
    return []


@pytest.fixture
def values(clock: Ticks, sent: list[ValuesLogged]) -> LoggedValues:
    return LoggedValues(sent.append, clock)


def test_once_a_second_with_the_sum_of_amounts(values: LoggedValues, sent: list[ValuesLogged], clock: Ticks) -> None:
    for step in range(1, 26):
        values.take(step, {"loss": 1.0 / step, "tokens": 100})
        clock.now += 0.125
    assert [one.step for one in sent] == [1, 9, 17, 25]
    assert sent[1].values == {"loss": 1.0 / 9}
    assert sum(one.sums["tokens"] for one in sent) == 2500
    assert sent[-1].seconds == pytest.approx(1.0)


def test_the_last_step_is_told_when_training_ends(values: LoggedValues, sent: list[ValuesLogged], clock: Ticks) -> None:
    for step in range(1, 6):
        values.take(step, {"loss": torch.tensor(1.0 / step, requires_grad=True), "tokens": 100})
        clock.now += 0.125
    assert [one.step for one in sent] == [1]
    values.end()
    assert [(one.step, one.last) for one in sent] == [(1, False), (5, True)]
    assert sent[-1].values == {"loss": pytest.approx(0.2)}
    assert sum(one.sums["tokens"] for one in sent) == 500


def test_nothing_is_told_at_the_end_of_a_script_that_logs_nothing(
    values: LoggedValues, sent: list[ValuesLogged]
) -> None:
    values.end()
    assert sent == []


class Hostile:
    """An object whose conversion fails."""

    is_cuda = False

    def __float__(self) -> float:
        raise RuntimeError("no")


def test_values_of_any_kind_do_no_harm(values: LoggedValues, sent: list[ValuesLogged]) -> None:
    given: dict[str, Any] = {
        "nan": math.nan, "infinite": -math.inf, "tensor": torch.tensor([[2.5]], requires_grad=True),
        "text": "5", "none": None, "hostile": Hostile(), "many": torch.ones(3), "huge": 10**400,
        "tokens": math.nan, "samples": -3,
    }  # fmt: skip
    values.take(1, given)
    (one,) = sent
    assert one.values == {"tensor": 2.5} and set(one.not_finite) == {"nan", "infinite"} and one.sums == {}
    assert to_agent.decode(to_agent.encode(one)) == one


def test_many_and_long_names_are_cut(values: LoggedValues, sent: list[ValuesLogged]) -> None:
    values.take(1, {f"{number}{'x' * 100_000}": number for number in range(1000)})
    assert len(sent[0].values) == 8 and all(len(name) == 32 for name in sent[0].values)


def test_nothing_to_say_is_not_sent(values: LoggedValues, sent: list[ValuesLogged]) -> None:
    values.take(1, {"loss": None})
    assert sent == []


def test_an_agent_that_does_not_read_is_not_waited_for() -> None:
    agent, rank = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent, rank:
        link = AgentLink(rank, Place.read({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}))
        message = ValuesLogged(1, 1.0, 1.0, {"loss": 1.0}, {})
        for _ in range(20_000):  # far more than the socket holds
            link.offer(message)
        assert isinstance(to_agent.decode(agent.recv(65536)), Attach)
        kept = 0
        while _waiting(agent):
            kept += isinstance(to_agent.decode(agent.recv(65536)), ValuesLogged)
        assert 0 < kept < 20_000
        link.step_done(7)
        found = to_agent.decode(agent.recv(65536))
        assert isinstance(found, StepDone) and found.step == 7  # the link still works


def _waiting(link: socket.socket) -> bool:
    try:
        link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        return True
    except BlockingIOError:
        return False


@pytest.mark.parametrize(
    ("rank", "tensor", "data", "speaks"), [(0, 2, 2, True), (1, 2, 2, False), (2, 2, 2, False), (4, 2, 2, True)]
)
def test_one_rank_of_each_pipeline_stage_speaks(rank: int, tensor: int, data: int, speaks: bool) -> None:
    from pathlib import Path

    agent, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with agent, ours:
        run = Run(rank, 8, 0, 0, 0, None, Path(), True, tensor, 2, data)
        run.log(loss=1.0)  # without a launcher nothing happens
        run._link = AgentLink(ours, Place.read({"RANK": str(rank), "WORLD_SIZE": "8", "LOCAL_RANK": "0"}))
        run._listen()
        agent.recv(65536)
        run.log(5, loss=1.0)
        assert _waiting(agent) == speaks
        if speaks:
            found = to_agent.decode(agent.recv(65536))
            assert isinstance(found, ValuesLogged) and (found.step, found.values) == (5, {"loss": 1.0})
            assert msgspec.to_builtins(found)["sums"] == {}
