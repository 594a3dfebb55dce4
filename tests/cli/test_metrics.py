"""``resilio metrics``: a table that fits, values for programs, the token; and what is no run."""

from __future__ import annotations

import hmac
import json
import time
from pathlib import Path

import pytest

from resilio_hpc.cli import main
from resilio_hpc.cli.metrics import MOST_ENDPOINTS, table
from resilio_hpc.launch.rundir.run_directory import open_run
from resilio_hpc.metrics.latest import NodeSample, write
from resilio_hpc.metrics.sheet import Sheet


@pytest.fixture
def run(tmp_path: Path) -> Path:
    open_run(tmp_path / "run")
    return tmp_path / "run"


def sheet() -> Sheet:
    found = Sheet()
    found.put("host_cpu_used_ratio", 0.5)
    found.put("host_memory_total_bytes", 100)
    found.put("host_memory_available_bytes", 60)
    found.put("job_memory_limit_bytes", 50)
    found.put("job_memory_used_bytes", 45)
    for gpu in range(2):
        found.put("gpu_utilization_ratio", 0.9 + gpu / 10, gpu)
        found.put("gpu_memory_used_bytes", 40 + gpu, gpu)
        found.put("gpu_memory_total_bytes", 80, gpu)
    found.put("rank_resident_bytes", 3 << 30, 0)
    found.put("rank_step", 12, 0)
    found.put("rank_step", 11, 1)
    return found


def test_a_node_in_a_line(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(run, "n1", sheet(), time.time() - 5, "http://127.0.0.1:9400/metrics")
    write(run, "n2", Sheet(), time.time() - 5, "")
    assert main.main(["metrics", str(run)]) == 0
    head, first, second, empty, endpoint = capsys.readouterr().out.splitlines()
    cells = [cell for cell in first.split("  ") if cell]
    assert [cell.strip() for cell in cells[2:]] == ["50 %", "90 %", "95 %", "51 %", "3 GiB", "11"]
    assert second.split()[0] == "n2"
    assert second.split()[-6:] == ["-"] * 6
    assert (empty, endpoint) == ("", "n1: http://127.0.0.1:9400/metrics")
    assert len(head) == len(first) <= 80


@pytest.mark.parametrize("width", [60, 80, 200])
def test_it_fits_with_long_and_hostile_names_and_many_endpoints(width: int) -> None:
    values = dict.fromkeys(("rank_step{rank=0}", "host_cpu_used_ratio", "rank_resident_bytes{rank=0}"), 1.0)
    samples = [NodeSample(f"node{n}-" + "x" * 80, 0.0, "http://" + "h" * 100, values) for n in range(30)]
    lines = table(samples, 10.0**9, width)
    assert max(map(len, lines)) <= width
    assert lines[-1] == f"and {30 - MOST_ENDPOINTS} more"


def test_for_programs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["metrics", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []
    write(run, "n1", sheet(), 12.0, "")
    assert main.main(["metrics", str(run), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["node"], one["time"], one["values"]["rank_step{rank=0}"]) == ("n1", 12.0, 12.0)


def test_the_token_is_made_of_the_secret_and_is_not_it(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["metrics", str(run), "--token"]) == 0
    told = capsys.readouterr().out.strip()
    secret = (run / "secret").read_bytes().strip()
    assert told == hmac.new(secret, b"resilio metrics", "sha256").hexdigest()
    assert secret.decode() not in told


def test_mistakes(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (([str(run)], "has no samples"), ([str(tmp_path / "nowhere")], "does not exist")):
        assert main.main(["metrics", *words]) == 2
        assert said in capsys.readouterr().err
    assert main.main(["metrics", str(run), "--wach"]) == 2
    assert "unrecognized arguments: --wach" in capsys.readouterr().err
