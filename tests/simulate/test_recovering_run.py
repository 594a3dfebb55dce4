"""Simulated runs: each microsecond has a cause, and the product's own code decides."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from resilio_hpc.core.tiers import Tier
from resilio_hpc.events.rungs import Rung
from resilio_hpc.launch.chain import continuation_policy
from resilio_hpc.launch.controller.checkpoints import replica_placement
from resilio_hpc.launch.controller.checkpoints.replica_placement import RestoreChoice
from resilio_hpc.launch.controller.facts import recovery_policy
from resilio_hpc.launch.controller.facts.recovery_policy import RecoveryPlan
from resilio_hpc.launch.protocol.failure_class import classify
from resilio_hpc.launch.protocol.message_parts import RestorePoint
from resilio_hpc.report.accounting.causes import TimeCause
from resilio_hpc.simulate import recovering_run, state_places
from resilio_hpc.simulate.account import SimulatedResult
from resilio_hpc.simulate.constants import Constants, SourceKind, defaults
from resilio_hpc.simulate.fault_trace import Domain, SimulatedFault, fault_trace
from resilio_hpc.simulate.fleets import FaultKind, fleet_named
from resilio_hpc.simulate.peers import PeerRun, peers
from resilio_hpc.simulate.rank_failures import rank_failure
from resilio_hpc.simulate.recovering_run import RecoveringRun
from resilio_hpc.simulate.virtual_run import SimulatedSetup

HOUR = 3_600_000_000
SETUP = SimulatedSetup(8, 8, 86_400.0, spares=2, partner_copies=True)


def numbers(**given: float) -> Constants:
    return defaults().replaced(given, SourceKind.GIVEN, "a test")


def fault(hour: float, kind: FaultKind, *places: int, lasting: bool = False, back_h: float = 1000.0) -> SimulatedFault:
    return SimulatedFault(round(hour * HOUR), kind, places, lasting, round(back_h * HOUR))


def run(*faults: SimulatedFault, setup: SimulatedSetup = SETUP, **given: float) -> SimulatedResult:
    return RecoveringRun(setup, numbers(**given), faults).result()


def drawn(seed: int) -> tuple[SimulatedSetup, Constants, list[SimulatedFault]]:
    """A run of any kind, with many faults."""
    draw = Random(seed)
    setup = SimulatedSetup(
        draw.choice((1, 2, 8, 40)), 8, draw.choice((3600.0, 86_400.0)), draw.choice((0, 1, 3)), 0,
        draw.choice((1.0, 60.0, 600.0, 1e5)), draw.random() < 0.5, draw.random() < 0.5, draw.random() < 0.5,
        draw.random() < 0.5, draw.random() < 0.7, draw.choice((None, 900.0, 20_000.0)), draw.choice((0, 3, 50)),
    )  # fmt: skip
    setup = replace(setup, min_nodes=draw.randint(1, setup.nodes))
    given = {"repair_h": draw.choice((0.0, 0.1, 24.0)), "store_gb_s": draw.choice((0.01, 1.0, 100.0)),
             "queue_s": draw.choice((0.0, 300.0)), "gb_per_gpu": draw.choice((0.0, 0.35, 30.0))}  # fmt: skip
    if draw.random() < 0.5:
        given["by_hand_s"] = draw.choice((1.0, 3600.0))
    fleet = replace_rate(draw.choice((0.01, 1.0, 30.0)))
    domains = (Domain(draw.choice((1, 2, 16)), 3600.0 * draw.choice((5, 50))),) if draw.random() < 0.5 else ()
    constants = numbers(**given)
    faults = fault_trace(fleet, constants, setup.nodes, 8, setup.spares, setup.seconds, seed, domains)
    return setup, constants, faults


def replace_rate(per_gpu_day: float) -> Any:
    import msgspec

    return msgspec.structs.replace(fleet_named("llama3"), per_gpu_day=per_gpu_day)


@pytest.mark.parametrize("seed", range(60))
def test_each_microsecond_of_any_run_has_one_cause(seed: int) -> None:
    setup, constants, faults = drawn(seed)
    runs = [RecoveringRun(setup, constants, faults).result()]
    runs += [PeerRun(policy, setup, constants, faults).result() for policy in peers().values()]
    for one in runs:
        assert one.wall_us == round(setup.seconds * 1e6)
        assert all(us >= 0 for us in one.by_cause.values())
        assert 0 <= one.work <= 1 and 0 <= one.idle_node_us <= one.node_us
        # work is done in time for training, by all nodes at most
        assert one.work * one.wall_us <= one.by_cause[TimeCause.TRAIN] + one.by_cause[TimeCause.REPEATED] + 1
        assert one.ended or one.by_cause[TimeCause.UNKNOWN] == 0
    assert RecoveringRun(setup, constants, faults).result() == runs[0]


def test_without_faults_all_time_is_training_but_for_start_and_saves() -> None:
    found = run()
    assert found.counts == {"restored from nothing": 1}
    rest = found.wall_us - found.by_cause[TimeCause.TRAIN]
    assert rest == found.by_cause[TimeCause.START] + found.by_cause[TimeCause.SAVE]


def test_a_bug_costs_a_part_of_a_step_and_a_lost_node_the_time_since_its_copy() -> None:
    at = 12.04  # not at the end of a step, and minutes after a save
    bug, node = run(fault(at, FaultKind.PROCESS, 1)), run(fault(at, FaultKind.NODE, 1))
    assert 0 < bug.by_cause[TimeCause.REPEATED] < 5_000_000
    assert 10_000_000 < node.by_cause[TimeCause.REPEATED] < 600_000_000
    assert node.by_cause[TimeCause.DETECT] == 5_700_000 and bug.by_cause[TimeCause.DETECT] == 0
    assert (bug.counts["restart_ranks"], node.counts["replace_node"]) == (1, 1)
    assert node.counts["restored from memory, lost nodes' from copies"] == 1


def test_a_share_of_the_faults_goes_back_to_the_last_snapshot() -> None:
    bugs = [fault(hour + 0.04, FaultKind.PROCESS, 1) for hour in range(1, 21)]
    all_saved, half = run(*bugs), run(*bugs, last_step_share=0.5)
    none = run(*bugs, setup=replace(SETUP, last_step=False))
    lost = none.by_cause[TimeCause.REPEATED] - all_saved.by_cause[TimeCause.REPEATED]
    assert lost > 20 * 10_000_000
    assert 0.3 * lost < half.by_cause[TimeCause.REPEATED] < 0.7 * lost


def test_what_nodes_of_one_switch_lose_together_is_read_from_the_store() -> None:
    pair = 1, replica_placement.copier_rank(1, 8)
    apart = run(fault(12.04, FaultKind.NODE, 1, 2))
    both = run(fault(12.04, FaultKind.NODE, *pair), store_gb_s=0.2)
    assert apart.counts["restored from memory, lost nodes' from copies"] == 1
    assert both.counts["restored from memory, lost nodes' from the store"] == 1
    assert both.by_cause[TimeCause.REPEATED] > apart.by_cause[TimeCause.REPEATED]


def test_nodes_with_disks_of_their_own_need_the_store_for_the_lost_ones_alone() -> None:
    pair = 1, replica_placement.copier_rank(1, 8)
    # a save each minute that takes five: the committed step is older than what is in memory
    slow = {"store_gb_s": 0.07, "gb_per_gpu": 0.35}
    setup = replace(SETUP, save_every_s=60.0)
    store = run(fault(12.04, FaultKind.NODE, *pair), setup=setup, **slow)
    disks = run(fault(12.04, FaultKind.NODE, *pair), setup=replace(setup, local_disks=True), **slow)
    assert store.counts["restored from the store"] == disks.counts["restored from the nodes' own disks"] == 1
    assert disks.by_cause[TimeCause.LOAD] < store.by_cause[TimeCause.LOAD] / 3
    jobs = run(setup=replace(setup, local_disks=True, job_s=6 * 3600), **slow)
    assert jobs.counts["restored from the store"] == 3  # other nodes


def test_replicas_lose_no_step_with_a_node() -> None:
    found = run(fault(12.04, FaultKind.NODE, 1), setup=replace(SETUP, replicated=True, partner_copies=False))
    assert found.by_cause[TimeCause.REPEATED] < 5_000_000


def test_without_spares_a_run_shrinks_and_grows_again() -> None:
    setup = replace(SETUP, spares=0, min_nodes=4)
    found = run(fault(6, FaultKind.NODE, 3, back_h=6), setup=setup)
    assert found.counts["shrink"] == 1
    assert 0 < found.by_cause[TimeCause.TRAIN] / found.wall_us - found.work < 0.25 / 8 * 1.05  # 6 h of 7 nodes
    assert found.by_cause[TimeCause.START] > run(setup=setup).by_cause[TimeCause.START]


def test_a_node_that_none_replaces_is_left_to_the_next_job_or_ends_the_run() -> None:
    setup = replace(SETUP, spares=0)
    found = run(fault(6, FaultKind.NODE, 3), setup=setup, queue_s=1800)
    assert (found.counts["next_job"], found.counts["jobs by the chain"]) == (1, 1)
    assert found.by_cause[TimeCause.QUEUE] == HOUR // 2
    alone = run(fault(6, FaultKind.NODE, 3), setup=replace(setup, chained=False))
    assert alone.ended == "stopped with not_enough_nodes"
    assert alone.by_cause[TimeCause.UNKNOWN] > 17 * HOUR
    by_hand = run(fault(6, FaultKind.NODE, 3), setup=replace(setup, chained=False), by_hand_s=3600)
    assert by_hand.ended == "" and by_hand.by_cause[TimeCause.QUEUE] == HOUR
    assert by_hand.counts["jobs by hand"] == 1


def test_a_broken_gpu_that_no_sound_node_replaces_uses_the_restarts_up() -> None:
    found = run(fault(6, FaultKind.DEVICE, 3, lasting=True), setup=replace(SETUP, spares=0))
    assert found.ended == "stopped with no_progress" and found.counts["restart_ranks"] == 3
    evicted = run(fault(6, FaultKind.DEVICE, 3, lasting=True), setup=replace(SETUP, spares=0, evict_devices=True))
    assert evicted.ended == "" and evicted.counts["next_job"] == 1


def test_spares_cost_what_they_hold() -> None:
    with_two, without = run(), run(setup=replace(SETUP, spares=0))
    assert with_two.ettr == without.ettr
    assert without.of_held == pytest.approx(without.work) and with_two.of_held == pytest.approx(0.8 * with_two.work)


def test_a_job_saves_all_at_its_time_limit() -> None:
    found = run(setup=replace(SETUP, job_s=6 * 3600))
    assert found.counts["jobs by the chain"] == 3 and found.by_cause[TimeCause.REPEATED] == 0


def test_a_fault_in_a_recovery_begins_it_again() -> None:
    second = 12.04 + 10 / 3600
    found = run(fault(12.04, FaultKind.PROCESS, 1), fault(second, FaultKind.NODE, 2))
    assert found.counts["faults"] == 2
    assert found.counts["restored from memory, lost nodes' from copies"] == 1
    assert found.by_cause[TimeCause.RECOVER] > 40_000_000


# -- the real code decides ---------------------------------------------------------------------------------------------

FAULTS = (fault(6.04, FaultKind.NODE, 1), fault(12.04, FaultKind.DEVICE, 2), fault(18.04, FaultKind.PROCESS, 3))


def never_restart(*_: object) -> RecoveryPlan:
    return RecoveryPlan(Rung.STOP, "planted")


@pytest.mark.parametrize(
    ("module", "name", "mutant"),
    [
        (recovering_run, "decide", never_restart),
        (recovery_policy, "RecoveryPlan", lambda rung, reason: RecoveryPlan(Rung.STOP, reason)),
        (state_places, "restore_choice", lambda _, committed: RestoreChoice(RestorePoint(Tier.COMMITTED, committed))),
        (replica_placement.InMemory, "has_most", lambda *_: False),
        (replica_placement.InMemory, "whole", property(lambda _: set[int]())),
        (recovering_run.Recovery, "moves_from", lambda *_: ""),
        (recovering_run.Recovery, "loses_state", property(lambda _: True)),
        (recovering_run, "suspect", lambda *_: False),
    ],
)
def test_another_policy_gives_another_answer(
    monkeypatch: pytest.MonkeyPatch, module: Any, name: str, mutant: Any
) -> None:
    before = run(*FAULTS, setup=replace(SETUP, partner_copies=False))
    monkeypatch.setattr(module, name, mutant, raising=True)
    assert run(*FAULTS, setup=replace(SETUP, partner_copies=False)) != before


def test_a_chain_that_does_not_go_on_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = replace(SETUP, job_s=6 * 3600)
    monkeypatch.setattr(continuation_policy, "CONTINUES", ())
    monkeypatch.setattr(continuation_policy, "ENDS", ("time_limit",))
    assert run(setup=setup).ended == "stopped with time_limit"


@pytest.mark.parametrize(
    ("kind", "cause"),
    [(FaultKind.PROCESS, "user_code"), (FaultKind.DEVICE, "gpu_hardware"), (FaultKind.NETWORK, "nic_network")],
)
def test_the_diagnosis_reads_a_fault_as_what_it_is(kind: FaultKind, cause: str) -> None:
    assert classify(rank_failure(kind, "n1", 0, 1.0, 7)).cause.value == cause
