"""The shipped rules and dashboard, with promtool and a real Prometheus, on what real controllers and checks expose."""

from __future__ import annotations

import json
import re
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from resilio_hpc.alerts.alert import default_limits
from resilio_hpc.alerts.judge import judge
from resilio_hpc.alerts.series import sheet
from resilio_hpc.cli.metrics import shipped
from resilio_hpc.launch.controller.run_metrics import RunMetrics
from resilio_hpc.metrics.exposition import Endpoint, exposition
from resilio_hpc.metrics.memory_watch import MemoryUsed, MemoryWatch
from resilio_hpc.metrics.schema import METRICS
from resilio_hpc.metrics.sheet import Sheet
from tests.support.alerts.alert_run import RUN_ID, AlertRun
from tests.support.alerts.scraped import Scrapes, firing
from tests.support.free_port import free_port
from tests.support.prolog_epilog.fake_nvml import FakeNvml, NVMLError_GpuIsLost, gpu_source
from tests.support.requirements import need_program
from tests.support.virtual_cluster.ranks import Script
from tests.support.virtual_cluster.world import World
from tests.support.waiting import PATIENCE_S, until

STEPS = Script(steps=1_000_000, step_s=2.0, save_every=5)
EVERY_S = 15


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.yml"
    path.write_text(shipped("alert_rules.yml"))
    return path


class LiveRun:
    """A run whose leading node is scraped, as its endpoint would be."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.metrics = RunMetrics(lambda: world.now)
        self.memory = MemoryWatch()
        self.used = 0.5
        self.scrapes = Scrapes(EVERY_S)
        self.expected: dict[int, Sequence[str]] = {}

    def text(self) -> bytes:
        """What the endpoint serves now."""
        found = Sheet()
        for name, value in self.metrics.values(next(self.world.controllers(), None)).items():
            found.put(name, value)
        self.memory.look([MemoryUsed("host", self.used * 100, 100.0)], ("", 0.0), self.world.now)
        self.memory.put(found)
        return exposition(found, RUN_ID, "n1")

    def go(self, seconds: float, fires: bool | None = None) -> None:
        """Go on, scraped; ``fires``: whether the alert then does."""
        for _ in range(int(seconds / EVERY_S)):
            self.world.run(limit_s=EVERY_S)
            self.scrapes.take(self.text())
        if fires is not None:
            self.expected[self.scrapes.now_s] = [""] if fires else []


def few_steps(run: LiveRun) -> None:
    run.go(1800, fires=False)
    run.world.life.absent.add(1)
    run.go(1200, fires=True)
    run.world.life.absent.clear()
    run.go(2700, fires=False)


def slow_save(run: LiveRun) -> None:
    run.go(60, fires=False)
    run.world.save_s = 40.0
    run.go(150, fires=True)
    run.world.save_s = 0.2
    run.go(150, fires=False)


def stalled(run: LiveRun) -> None:
    run.go(120, fires=False)
    run.world.life.absent.add(1)
    run.go(180, fires=True)
    run.world.life.absent.clear()
    run.go(60, fires=False)


def no_progress(run: LiveRun) -> None:
    run.go(120, fires=False)
    run.world.life.absent.add(1)
    run.go(1860, fires=True)
    run.world.life.absent.clear()
    run.go(60, fires=False)


def restart_storm(run: LiveRun) -> None:
    run.go(60, fires=False)
    for _ in range(6):
        run.world.fail_rank(1)
        run.go(60)
    run.go(15, fires=True)
    run.go(3600, fires=False)


def budget_low(run: LiveRun) -> None:
    run.world.saver_fails = {("n1", step) for step in range(0, 200, 5)}
    run.go(60, fires=False)
    for _ in range(2):
        run.world.fail_rank(1)
        run.go(60)
    run.go(15, fires=True)
    run.world.saver_fails.clear()
    run.go(120, fires=False)


def node_lost(run: LiveRun) -> None:
    run.go(60, fires=False)
    run.world.power_off("n3")
    run.go(15, fires=True)
    run.world.sites["n3"].off = False
    run.world.start_agent("n3")
    run.go(60, fires=False)


def memory(run: LiveRun) -> None:
    run.go(60, fires=False)
    run.used = 0.93
    run.go(30, fires=True)
    run.used = 0.5
    run.go(30, fires=False)


LIVE: dict[str, Callable[[LiveRun], None]] = {
    "ResilioFewSteps": few_steps, "ResilioSlowSave": slow_save, "ResilioStalled": stalled,
    "ResilioNoProgress": no_progress, "ResilioRestartStorm": restart_storm, "ResilioBudgetLow": budget_low,
    "ResilioNodeLost": node_lost, "ResilioMemoryNearlyFull": memory,
}  # fmt: skip


GPU: dict[str, tuple[str, Any, Any, float]] = {  # a question of NVML, its answers, and for how long before it fires
    "ResilioGpuLost": ("nvmlDeviceGetMemoryInfo", NVMLError_GpuIsLost("lost"), None, 60),
    "ResilioGpuUncorrectedErrors": ("nvmlDeviceGetTotalEccErrors", lambda kind, which: 2 * kind, None, 60),
    "ResilioGpuRemapPending": ("nvmlDeviceGetRemappedRows", (0, 1, 1, 0), None, 60),
    "ResilioGpuThrottled": ("nvmlDeviceGetCurrentClocksThrottleReasons", 0x44, 0x4, 360),
    "ResilioGpuLinkErrors": ("nvmlDeviceGetNvLinkErrorCounter", lambda link, kind: 5, None, 240),
}


@pytest.mark.parametrize("alert", GPU)
def test_a_rule_of_gpus_fires_for_the_one_gpu_and_clears(alert: str, rules: Path, tmp_path: Path) -> None:
    question, bad, good, after_s = GPU[alert]
    nvml = FakeNvml()
    source, scrapes, expected = gpu_source(tmp_path, nvml), Scrapes(EVERY_S), dict[int, Sequence[str]]()

    def go(seconds: float, fires: bool) -> None:
        for _ in range(int(seconds / EVERY_S)):
            scrapes.take(exposition(source.read(), RUN_ID, "n1"))
        expected[scrapes.now_s] = [""] if fires else []

    go(360, fires=False)
    usual = nvml._gpus[1][question]
    nvml._gpus[1][question] = bad
    go(after_s, fires=True)
    nvml._gpus[1][question] = usual if good is None else good
    go(3900, fires=False)
    assert firing(rules, scrapes, expected, alert, tmp_path) == ""


@pytest.mark.parametrize("alert", LIVE)
def test_a_live_rule_fires_and_clears(alert: str, rules: Path, tmp_path: Path) -> None:
    run = LiveRun(World(nodes=3, script=STEPS, hang_timeout_s=0.0, max_without_progress=3))
    LIVE[alert](run)
    assert firing(rules, run.scrapes, run.expected, alert, tmp_path) == ""
    assert {True, False} == {bool(names) for names in run.expected.values()}


def test_the_check_rule_fires_and_clears_with_the_alerts_of_a_run(rules: Path, tmp_path: Path) -> None:
    run = AlertRun(tmp_path / "run", World(nodes=3, spares=1, script=STEPS))
    scrapes, expected = Scrapes(60), {}

    def go(minutes: int) -> None:
        for _ in range(minutes):
            run.world.run(limit_s=60.0)
            facts = run.facts()
            alerts = judge(facts, {**default_limits(), "suspect_node": 0.2})
            scrapes.take(exposition(sheet(facts, alerts), RUN_ID, ""))
            expected[scrapes.now_s] = sorted({alert.name for alert in alerts})

    go(2)
    run.world.power_off("n2")
    go(2)
    run.world.sites["n2"].off = False
    run.world.start_agent("n2")
    run.world.save_s = 40.0
    go(5)
    run.world.save_s = 0.2
    go(20)
    seen = {name for names in expected.values() for name in names}
    assert {"spares_spent", "suspect_node", "slow_save"} <= seen and expected[scrapes.now_s] == []
    assert firing(rules, scrapes, expected, "ResilioCheck", tmp_path) == ""


def test_a_check_that_stopped_is_noticed(rules: Path, tmp_path: Path) -> None:
    """promtool's clock begins at 0, so the time of the check is moved there."""
    run = AlertRun(tmp_path / "run", World(nodes=2, script=STEPS))
    scrapes, began = Scrapes(60), run.now
    written = Sheet()

    def go(minutes: int, checks: bool) -> None:
        for _ in range(minutes):
            run.world.run(limit_s=60.0)
            if checks:
                facts = run.facts()
                written.update(sheet(facts, []))
                written.put("check_timestamp_seconds", facts.now - began)
            scrapes.take(exposition(written, RUN_ID, ""))

    go(5, checks=True)
    fine = scrapes.now_s
    go(18, checks=False)
    old = scrapes.now_s
    go(2, checks=True)
    assert firing(rules, scrapes, {fine: [], old: [""], scrapes.now_s: []}, "ResilioCheckIsOld", tmp_path) == ""


def test_every_rule_is_tested_and_promtool_takes_the_file(rules: Path) -> None:
    need_program("promtool", package="prometheus")
    subprocess.run(["promtool", "check", "rules", str(rules)], check=True, capture_output=True, timeout=60)
    names = set(re.findall(r"alert: (\w+)", rules.read_text()))
    assert names == {*LIVE, *GPU, "ResilioCheck", "ResilioCheckIsOld"}


def expressions() -> list[str]:
    """Of the dashboard's panels."""
    panels = json.loads(shipped("dashboard.json"))["panels"]
    return [target["expr"] for panel in panels for target in panel["targets"]]


def test_rules_and_dashboard_name_metrics_that_exist() -> None:
    known = {metric.full_name for metric in METRICS.values()}
    for text in (shipped("alert_rules.yml"), *expressions()):
        named = set(re.findall(r"resilio_[a-z_0-9]+", re.sub(r"#.*", "", text)))
        assert named and named <= known


def test_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(shipped("dashboard.json"))["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells


# -- a real Prometheus -------------------------------------------------------------------------------------------------


@contextmanager
def prometheus(folder: Path, target: str, rules: Path) -> Iterator[Callable[[str], Any]]:
    """A server that scrapes ``target`` every second; asks its API."""
    need_program("prometheus", package="prometheus")
    port = free_port()
    config = folder / "prometheus.json"
    config.write_text(json.dumps({
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"}, "rule_files": [str(rules)],
        "scrape_configs": [{"job_name": "resilio", "static_configs": [{"targets": [target]}]}],
    }))  # fmt: skip
    argv = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]  # fmt: skip
    process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def ask(path: str) -> Any:
        try:
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
                f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10
            ) as answer:
                return json.load(answer)["data"]
        except OSError:
            return None

    try:
        until(lambda: ask("status/buildinfo"), "Prometheus answers", alive=lambda: process.poll() is None)
        yield ask
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.mark.slow
def test_a_real_server_scrapes_the_endpoint_fires_and_clears(rules: Path, tmp_path: Path) -> None:
    run = LiveRun(World(nodes=3, script=STEPS))
    run.go(60)
    endpoint = Endpoint("127.0.0.1", 0, "")
    endpoint.text = run.text()
    try:
        with prometheus(tmp_path, endpoint.url.split("/")[2], rules) as ask:

            def alerts() -> set[str]:
                found = ask("alerts") or {"alerts": []}
                return {one["labels"]["alertname"] for one in found["alerts"] if one["state"] == "firing"}

            until(lambda: (ask("query?query=resilio_run_phase") or {}).get("result"), "a scrape")
            assert alerts() == set()
            run.world.save_s = 40.0
            run.go(150)
            endpoint.text = run.text()
            until(lambda: alerts() == {"ResilioSlowSave"}, "the alert fires", alerts)
            run.world.save_s = 0.2
            run.go(150)
            endpoint.text = run.text()
            until(lambda: alerts() == set(), "the alert clears", alerts)
            for expression in expressions():
                asked = urllib.parse.quote(expression.replace("$run", ".*"))
                assert ask(f"query?query={asked}") is not None, expression
    finally:
        endpoint.close()
