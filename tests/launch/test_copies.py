"""Partner copies: what a lost node costs with them, and when they must not be used."""

from __future__ import annotations

from resilio_hpc.core.tiers import Tier
from resilio_hpc.launch.protocol import messages as m
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World

SLOW_S = 1000.0


def world(nodes: int = 4, spares: int = 1, **more: int) -> World:
    """The disk is slow: nothing is committed for a long time after the first step."""
    made = World(nodes=nodes, spares=spares, script=Script(save_every=10), **more)
    made.copy_port = 1
    made.run(lambda: 10 in made.directory.committed)
    made.slow_savers = dict.fromkeys(made.sites, SLOW_S)
    return made


def fetched(one: World) -> dict[int, str]:
    """Ranks whose snapshots had to be brought, and from which node; "" from the shared directory."""
    return {fetch.rank: fetch.endpoint.partition(":")[0] for fetch in one.last.fetches}


def test_a_lost_node_s_snapshots_come_from_its_partner() -> None:
    one = world()
    one.until_step(25)
    one.power_off("n2")
    one.until_round(1)
    assert one.last.restore == m.RestorePoint(Tier.MEMORY, 20)
    assert one.members() == ["n1", "n5", "n3", "n4"]
    assert fetched(one) == {2: "n4", 3: "n4"}  # half the run away
    assert one.records("start")[-1]["fetched"] == {2: "n4:1", 3: "n4:1"}
    assert one.records("recovered")[-1]["restored"] == 20


def test_each_node_can_be_lost_and_two_that_are_not_partners() -> None:
    for lost in (("n1",), ("n3",), ("n4",), ("n1", "n2"), ("n2", "n3")):
        one = world(spares=2)
        one.until_step(25)
        for node in lost:
            one.power_off(node)
        one.until_round(1)
        assert one.last.restore == m.RestorePoint(Tier.MEMORY, 20), lost
        assert len(fetched(one)) == 2 * len(lost)
        one.until_step(40)


def test_two_partners_lost_at_once_cost_what_was_not_committed() -> None:
    one = world(spares=2)
    one.until_step(25)
    for node in ("n2", "n4"):
        one.power_off(node)
    one.until_round(1)
    assert (one.last.restore, fetched(one)) == (m.RestorePoint(Tier.COMMITTED, 10), {})


def test_a_partner_lost_while_it_gives_costs_another_round() -> None:
    one = world(spares=2)
    one.until_step(25)
    one.power_off("n2")
    one.run(lambda: one.last.state.round == 1)
    assert one.last.fetches
    one.power_off("n4")  # nothing has come yet
    one.until_round(2)
    failures = [record for record in one.records("failure") if record.get("kind") == "restore_failed"]
    assert one.last.restore == m.RestorePoint(Tier.COMMITTED, 10), failures
    one.until_step(30)


def test_copies_of_steps_that_are_computed_anew_do_not_count() -> None:
    """The node that holds them comes into a life that began before them."""
    one = world()
    one.until_step(25)
    assert {key[1] for key in one.agents["n4"].copies.kept} == {10, 20}
    one.bad_copies.add(m.RestorePoint(Tier.MEMORY, 20))
    one.fail_rank(0)
    one.run(lambda: one.last.restore == m.RestorePoint(Tier.MEMORY, 10))
    one.run(lambda: one.life.step > 10)
    assert {key[1] for key in one.agents["n4"].copies.kept} == {10}
    one.bad_copies.clear()
    one.power_off("n2")  # before step 20 has come again
    one.until_round(one.last.state.round + 1)
    assert one.last.restore == m.RestorePoint(Tier.MEMORY, 10)


def test_a_committed_step_that_the_others_hold_is_read_by_the_new_node_alone() -> None:
    one = World(nodes=4, spares=1, script=Script(save_every=10))
    one.run(lambda: 10 in one.directory.committed)
    one.power_off("n2")
    one.until_round(1)
    assert one.last.restore == m.RestorePoint(Tier.MEMORY, 10)
    assert fetched(one) == {2: "", 3: ""}
    assert [one.last.restore_of(rank) for rank in (1, 2)] == [
        m.RestorePoint(Tier.MEMORY, 10), m.RestorePoint(Tier.COMMITTED, 10)
    ]  # fmt: skip
    one.until_step(30)


def test_a_committed_step_that_few_hold_is_read_by_all() -> None:
    one = World(nodes=2, spares=1, script=Script(save_every=10))
    one.run(lambda: 10 in one.directory.committed)
    one.power_off("n2")
    one.until_round(1)
    assert (one.last.restore, one.last.fetches) == (m.RestorePoint(Tier.COMMITTED, 10), ())


def test_copies_of_another_world_size_do_not_count() -> None:
    one = world(nodes=4, spares=0, minimum=2)
    one.until_step(25)
    one.power_off("n2")
    one.until_round(1)
    assert one.members() == ["n1", "n3", "n4"]
    assert one.last.restore == m.RestorePoint(Tier.COMMITTED, 10)


def test_one_node_alone_has_no_partner() -> None:
    one = World(nodes=1, script=Script(save_every=10))
    one.copy_port = 1
    one.until_step(25)
    assert one.agents["n1"].copies.kept == {}
    one.fail_rank(0)
    one.until_round(1)
    assert (one.last.restore, one.last.fetches) == (m.RestorePoint(Tier.MEMORY, 20), ())


def test_who_restores_from_files_is_told_where_other_nodes_disks_are_read() -> None:
    for copy_port, asked in ((0, (2, 2, 2, 2)), (1, ())):  # with partner copies nobody reads any file
        one = World(nodes=4, spares=1, script=Script(save_every=10), disk_port=2)
        one.copy_port = copy_port
        one.run(lambda: 10 in one.directory.committed)  # noqa: B023
        assert one.last.disk_ports == ()  # there was nothing to restore
        one.until_step(15)
        one.power_off("n2")
        one.until_round(1)
        assert one.last.restore is not None
        assert one.last.disk_ports == asked


def partners(one: World) -> dict[str, list[str]]:
    """Whose snapshots each node was told to copy as replicas."""
    return {
        node: [message.partner.endpoint for message in agent.heard if isinstance(message, m.KeepCopies)]
        for node, agent in one.agents.items()
    }


def test_who_copies_replicas_is_told_when_the_other_replicator_starts_and_in_each_round() -> None:
    one = World(nodes=4, spares=1, script=Script(save_every=10), replica_copies=True)
    one.until_step(15)
    assert partners(one) == {f"n{number}": [] for number in range(1, 6)}
    one.copy_port = 1
    one.until_step(25)
    assert partners(one) == {"n1": ["n3:1"], "n2": ["n4:1"], "n3": ["n1:1"], "n4": ["n2:1"], "n5": []}
    one.power_off("n2")
    one.until_step(35)
    assert one.members() == ["n1", "n5", "n3", "n4"]
    assert partners(one) == {"n1": ["n3:1"] * 2, "n3": ["n1:1"] * 2, "n4": ["n2:1", "n5:1"], "n5": ["n4:1"]}


def test_with_whole_copies_nobody_is_told_to_copy_replicas() -> None:
    one = world()
    one.until_step(25)
    assert set(map(len, partners(one).values())) == {0}
