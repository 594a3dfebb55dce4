"""The baseline of a node: who may write it, what is believed, how baselines of many nodes compare."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from resilio_hpc.cli.main import main
from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base.node import NodeView, boot_id
from resilio_hpc.prolog_epilog.base.table import Table
from resilio_hpc.prolog_epilog.base.table import load as table_of
from resilio_hpc.prolog_epilog.daemon.watch import Watch
from resilio_hpc.prolog_epilog.run import baseline
from resilio_hpc.prolog_epilog.run.baseline import Baseline, Values, alike, differences, load, read, summary
from resilio_hpc.prolog_epilog.run.cached_verdict import VerdictCache
from resilio_hpc.prolog_epilog.run.health_run import HealthRun
from resilio_hpc.prolog_epilog.run.runner import RunMemory
from tests.support.prolog_epilog.node_trees import write

NORMAL: Values = {"ib-link": {"mlx5_0/1": True, "mlx5_1/1": False}, "ib-rate": {"mlx5_0/1": 400.0}}


def of(node: str, checks: Values) -> Baseline:
    return Baseline(node=node, unix_s=1e9, checks=checks)


def test_what_is_written_is_read_and_what_others_could_write_is_not(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "baseline"
    path = baseline.write(directory, of("n1", NORMAL))
    assert read(directory, "n1") == of("n1", NORMAL) and read(directory, "n2") is None
    assert load(directory, "n1") == (NORMAL, "") and load(tmp_path / "none", "n1") == ({}, "")
    path.chmod(0o664)
    assert load(directory, "n1")[0] == {} and "mode 664: remove it" in load(directory, "n1")[1]
    path.chmod(0o644)
    path.rename(directory / "other")
    path.symlink_to("other")
    assert load(directory, "n1")[0] == {}
    path.unlink()
    for text in ("", "{", '{"node": 3}', '{"node": "n1", "unix_s": 1, "checks": {"ib-link": {"a": "b"}}}'):
        path.write_text(text)
        with pytest.raises(HealthError, match="take it again"):
            read(directory, "n1")
    path.unlink()
    os.mkfifo(path)
    assert "not what we would have made" in load(directory, "n1")[1]


def test_a_directory_that_hangs_is_given_up(tmp_path: Path) -> None:
    values, why = load(tmp_path, "n1", 0.1, lambda *_: time.sleep(600))
    assert values == {} and "does not answer" in why


def test_the_first_look_of_a_boot_reads_it_and_says_where_it_is_not_believed(tmp_path: Path) -> None:
    site, kept, told = tmp_path / "health.toml", tmp_path / "baseline", list[str]()
    site.write_text(f'[settings.baseline]\ndirectory = "{kept}"\n')
    path = baseline.write(kept, of("n1", {"ib-link": {"mlx5_9/1": True}}))
    table = table_of(site)
    node = NodeView(settings=table.settings, root=write(tmp_path / "root"))
    health_run = HealthRun(table, node, "n1", said=told.append)
    memory = RunMemory()
    for _ in range(2):
        (result,) = health_run.run([table.check("ib-link")], memory)
        assert [fault.evidence for fault in result.faults] == ["mlx5_9/1 is not there any more"]
        path.unlink(missing_ok=True)  # it is read once a boot
    baseline.write(kept, of("n1", NORMAL)).chmod(0o646)
    (result,) = health_run.run([table.check("ib-link")], RunMemory())
    assert result.faults == () and len(told) == 1 and "the baseline is not believed" in told[0]


def test_a_daemon_that_learns_slurms_name_of_the_node_reads_that_nodes_baseline(tmp_path: Path) -> None:
    baseline.write(tmp_path / "kept", of("gpu1", {"ib-link": {"mlx5_9/1": True}}))
    (tmp_path / "health.toml").write_text(f'[settings.baseline]\ndirectory = "{tmp_path / "kept"}"\n')
    whole = table_of(tmp_path / "health.toml")
    node = NodeView(settings=whole.settings, root=write(tmp_path / "root"))
    health_run = HealthRun(Table({"ib-link": whole.check("ib-link")}, whole.settings), node, "host17")
    (tmp_path / "run").mkdir()
    daemon = Watch(health_run, VerdictCache(tmp_path / "run" / "health"), lambda _: None)
    verdict = daemon.turn()
    assert verdict is not None and verdict.findings == ()
    daemon.rename("gpu1")  # slurmctld was away at first
    (daemon.cache.directory / "wanted").touch()
    verdict = daemon.turn()
    assert verdict is not None
    assert [one.evidence for one in verdict.findings] == ["mlx5_9/1 is not there any more"]


def test_the_odd_ones_among_many_nodes_stand_out() -> None:
    many = [of(f"n{number}", NORMAL) for number in range(1, 9)]
    odd = of("n9", {**NORMAL, "ib-rate": {"mlx5_0/1": 200.0}})
    other = of("login", {"ib-rate": {"mlx5_0/1": 100.0}})
    groups = alike([odd, *many, other])
    assert [len(group.nodes) for group in groups] == [8, 1, 1]
    told = {group.nodes[0]: [str(one) for one in group.unlike] for group in groups}
    assert told["n1"] == [] and told["n9"] == ["ib-rate mlx5_0/1: 200, was 400"]
    assert "ib-link mlx5_0/1: not there, was yes" in told["login"]
    assert alike([]) == [] and differences(NORMAL, NORMAL) == []


def test_a_summary_names_the_commonest_value_first() -> None:
    assert summary({f"mlx5_{number}/1": number != 5 for number in range(10)}) == (
        "yes: mlx5_0/1, mlx5_1/1, mlx5_2/1 … (9); no: mlx5_5/1"
    )


def test_the_command_learns_shows_what_changes_compares_and_forgets(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    (tmp_path / "run").mkdir()
    kept, cache = tmp_path / "baseline", VerdictCache(tmp_path / "run" / "health")
    site = tmp_path / "health.toml"
    site.write_text(f'[settings.baseline]\ndirectory = "{kept}"\n[settings.file-systems]\npaths = ["/"]\ntypes = []\n')

    def said(*argv: str, code: int = 0) -> str:
        where = ["--site", str(site), "--directory", str(cache.directory)]
        assert main(["health", "baseline", *argv, *where]) == code
        return capsys.readouterr().out

    names = ["cpu-online", "memory-size", "mount-writable"]
    assert "nothing was written" in said(*names, "--dry-run") and not kept.exists()
    assert "normal from now on, in" in said(*names)
    found = read(kept, "n1")
    assert found is not None and sorted(found.checks) == names
    assert found.checks["cpu-online"] == {"online": len(os.sched_getaffinity(0))} or found.checks["cpu-online"]
    assert cache.memory(boot_id()).normal == found.checks
    before = {**found.checks, "cpu-online": {"online": 4096}}
    baseline.write(kept, of("n1", before))
    assert "changes: cpu-online online: " in said("cpu-online")  # the others stay
    again = read(kept, "n1")
    assert again is not None and again.checks == found.checks
    baseline.write(kept, of("n2", before))
    assert "cpu-online online: " in said("--compare", str(kept))
    assert len(json.loads(said("--compare", str(kept), "--json"))) == 2
    said("--forget")
    assert read(kept, "n1") is None and cache.memory(boot_id()).normal == {}
    assert main(["health", "baseline", "disk-space", "--site", str(site)]) == 2
    assert "compares with no baseline" in capsys.readouterr().err
