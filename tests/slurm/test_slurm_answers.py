"""What Slurm prints becomes the same model whatever its version, and nothing it prints is taken for what it is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resilio_hpc.core.errors import SlurmError
from resilio_hpc.devtools.devcluster.spec import SLURM_SERIES
from resilio_hpc.slurm.client import job_json, node_json, text_output
from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.gres import Gres
from resilio_hpc.slurm.client.slurm_errors import Unanswered

SAMPLES = Path(__file__).with_name("samples")
SERIES = tuple(SLURM_SERIES)


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


@pytest.mark.parametrize("series", SERIES)
def test_nodes_of_every_version(series: str) -> None:
    nodes = {node.name: node for node in node_json.parse_nodes(sample(f"nodes_{series}.json"))}
    assert list(nodes) == ["n1", "n2", "n3", "n4"]
    drained = nodes["n4"]
    assert str(drained.state) == "IDLE+DRAIN"
    assert (drained.reason, drained.reason_by) == ("resilio: test drain", "root")
    assert drained.reason_time is not None
    assert abs(drained.reason_time - 1795199223) < 1000
    assert (drained.cpus, drained.cpus_allocated, drained.memory_mb, drained.weight) == (8, 0, 32000, 10)
    assert drained.partitions == ("low", "main")
    assert drained.features == drained.active_features == ("fast", "rackA")
    assert drained.gres == (Gres("gpu", "h100", 4),)
    assert drained.version.startswith(series)
    busy = series != "26.05"  # where the recorded job had not started yet
    assert (nodes["n1"].state.base, nodes["n1"].cpus_allocated) == (("MIXED", 1) if busy else ("IDLE", 0))
    assert nodes["n1"].gres_used == (Gres("gpu", "h100", 1, indices="0") if busy else Gres("gpu", "h100", 0),)
    assert (nodes["n1"].reason, nodes["n1"].reason_by, nodes["n1"].reason_time) == ("", "", None)


@pytest.mark.parametrize("series", SERIES)
def test_jobs_of_every_version(series: str) -> None:
    jobs = {job.name: job for job in job_json.parse_jobs(sample(f"jobs_{series}.json"))}
    running = jobs["simple"]
    assert (str(running.state), running.nodes) == ("RUNNING", ("n1", "n2"))
    assert (running.comment, running.time_limit_s, running.node_count, running.user_id) == ('{"k":1}', 300, 2, 0)
    assert running.end_time is not None
    assert running.start_time is not None
    assert running.end_time - running.start_time == 300
    pending = jobs["pend"]
    assert (str(pending.state), pending.nodes, pending.start_time) == ("PENDING", (), None)
    assert (pending.reason, pending.array_job_id, pending.address) == ("Priority", None, str(pending.id))


@pytest.mark.parametrize("series", SERIES)
def test_partitions_of_every_version(series: str) -> None:
    main, low = text_output.parse_partitions(sample(f"partitions_{series}.txt"))
    assert (main.name, main.default, low.name, low.default) == ("main", True, "low", False)
    assert (main.state, main.nodes, main.total_nodes, main.total_cpus) == ("UP", ("n1", "n2", "n3", "n4"), 4, 32)
    assert (main.max_time_s, main.default_time_s, low.default_time_s) == (3600, 1800, None)
    assert (main.max_nodes, main.preempt_mode, low.preempt_mode) == (float("inf"), "OFF", "REQUEUE")


def nodes_json(*records: Any, **more: Any) -> str:
    return json.dumps({"nodes": list(records), "errors": [], **more})


@pytest.mark.parametrize(
    "record",
    [
        {"name": "n1"},
        {"name": "n1", "state": None, "gres": None, "weight": None, "features": None, "partitions": None},
        {"name": "n1", "state": 7, "gres": 7, "weight": {"set": False}, "reason": ["x"], "partitions": {"a": 1}},
        {"name": "n1", "state": ["SPARKLING", 3, None], "cpus": {"infinite": True, "set": True, "number": 0}},
        {"name": "n1", "state": ["IDLE", "DOWN"], "weight": -1e308},
    ],
)
def test_odd_fields_are_unknown_and_harm_no_other_node(record: dict[str, Any]) -> None:
    good = {"name": "n2", "state": ["IDLE"], "weight": 3}
    odd, other = node_json.parse_nodes(nodes_json(record, good))
    assert (odd.name, odd.state.known, odd.reason) == ("n1", False, "")
    assert (other.state.base, other.weight) == ("IDLE", 3)


def test_what_is_no_node_is_left_out() -> None:
    assert node_json.parse_nodes(nodes_json(None, 3, "n1", [], {}, {"name": None})) == ()
    twice = node_json.parse_nodes(nodes_json({"name": "n1", "state": "DOWN"}, {"name": "n1", "state": "IDLE"}))
    assert [node.state.base for node in twice] == ["DOWN"]


@pytest.mark.parametrize("output", ["", "null", "[]", "3", "{}", '{"nodes": null}', '{"nodes": {}}', "slurm: fatal\n"])
def test_what_is_no_answer_is_garbled_and_not_an_empty_cluster(output: str) -> None:
    with pytest.raises(Garbled):
        node_json.parse_nodes(output)


@pytest.mark.parametrize("series", SERIES)
def test_a_torn_answer_is_garbled_wherever_it_is_torn(series: str) -> None:
    whole = sample(f"nodes_{series}.json").rstrip()
    for length in range(0, len(whole), 97):
        with pytest.raises(SlurmError):
            node_json.parse_nodes(whole[:length])


def test_no_answer_is_no_empty_cluster() -> None:
    """22.05 prints this, with exit code 0, when slurmctld is away."""
    away = '{"errors": [{"error": "Unspecified error", "errno": -1}], "nodes": []}'
    with pytest.raises(Unanswered, match="Unspecified error"):
        node_json.parse_nodes(away)
    with pytest.raises(Unanswered, match="Failed while looking for jobs"):
        job_json.parse_jobs('{"errors": [{"description": "Failed while looking for jobs"}], "jobs": []}')
    assert job_json.parse_jobs('{"errors": [{"error": "Invalid job id specified"}], "jobs": []}') == ()


def test_numbers_that_are_not_json_do_not_cost_the_answer() -> None:
    (node,) = node_json.parse_nodes('{"nodes": [{"name": "n1", "state": ["IDLE"], "cpu_load": NaN, "x": Infinity}]}')
    assert node.state.base == "IDLE"


MARK = "@0f3a;"


def table(columns: tuple[str, ...], *rows: dict[str, str]) -> str:
    return "".join("".join(row.get(column, "(null)") + MARK for column in columns) + "\n" for row in rows)


def job_row(number: str, **more: str) -> dict[str, str]:
    return {
        "JobID": number,
        "State": "RUNNING",
        "ArrayTaskID": "N/A",
        "ArrayJobID": number,
        "NodeList": "n[1-2]",
        **more,
    }


def test_a_user_cannot_forge_a_row() -> None:
    forged = "x\n99|COMPLETED|" + "".join(f"{column}@1111;" for column in text_output.JOB_COLUMNS)
    output = table(text_output.JOB_COLUMNS, job_row("7", Comment=forged, Name="JobState=FAILED\n"), job_row("8"))
    seven, eight = text_output.parse_jobs(output, MARK)
    assert (seven.id, str(seven.state), seven.comment, seven.name) == (7, "RUNNING", forged, "JobState=FAILED\n")
    assert (eight.id, eight.nodes, eight.array_job_id) == (8, ("n1", "n2"), None)


def test_a_torn_table_is_garbled() -> None:
    output = table(text_output.JOB_COLUMNS, job_row("7"), job_row("8"))
    assert len(text_output.parse_jobs(output, MARK)) == 2
    for length in range(1, len(output) - 1):
        whole_rows = output[:length].count(MARK) % len(text_output.JOB_COLUMNS) == 0 and output[:length].endswith(
            (MARK, "\n")
        )
        if not whole_rows:
            with pytest.raises(Garbled):
                text_output.parse_jobs(output[:length], MARK)


def test_tasks_of_an_array() -> None:
    waiting = job_row("5", ArrayJobID="5", ArrayTaskID="1-3%1", State="PENDING", NodeList="")
    one = job_row("6", ArrayJobID="5", ArrayTaskID="4")
    jobs = text_output.parse_jobs(table(text_output.JOB_COLUMNS, waiting, one), MARK)
    assert [(job.address, job.array_job_id, job.array_tasks) for job in jobs] == [("5", 5, "1-3%1"), ("5_4", 5, "4")]


def test_a_node_in_several_partitions_is_one_node() -> None:
    row = {"NodeList": "n1", "StateComplete": "idle+drain+planned", "Reason": "none", "Timestamp": "Unknown"}
    rows = [{**row, "PartitionName": name} for name in ("main", "low")]
    (node,) = text_output.parse_nodes(table(text_output.NODE_COLUMNS, *rows), MARK)
    assert (node.partitions, node.reason, node.state.flags) == (("low", "main"), "", {"DRAIN", "PLANNED"})
    rows = [{**row, "Timestamp": "1795199223", "PartitionName": "main"}]
    (node,) = text_output.parse_nodes(table(text_output.NODE_COLUMNS, *rows), MARK)
    assert (node.reason, node.reason_time) == ("none", 1795199223)  # somebody's own word


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30:00", 1800), ("1:00:00", 3600), ("1-00:00:00", 86400), ("UNLIMITED", float("inf")), ("0:30", 30),
     ("NONE", None), ("", None), ("Partition_Limit", None), ("-1:00", None)],
)  # fmt: skip
def test_durations(text: str, seconds: float | None) -> None:
    assert text_output.duration_s(text) == seconds


values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["set", "infinite", "number"]), inner),
    max_leaves=5,
)
KEYS = ("name", "state", "job_id", "job_state", "nodes", "gres", "weight", "reason", "time_limit", "array_task_id")


@given(st.dictionaries(st.sampled_from(KEYS), values))
def test_no_value_stops_the_reading(record: dict[str, Any]) -> None:
    output = json.dumps({"nodes": [record], "jobs": [record], "errors": []})
    node_json.parse_nodes(output)
    job_json.parse_jobs(output)


def test_a_jobs_reason_is_what_slurm_says_in_words_where_it_does() -> None:
    """As seen on 22.05 and 26.05 of a job that was requeued held, and then cancelled; tables say the same."""
    held = {"job_id": 1, "job_state": ["CANCELLED"], "state_reason": "JobHeldUser", "state_description": ""}
    told = {**held, "job_id": 2, "state_description": "job requeued in held state"}
    jobs = job_json.parse_jobs(json.dumps({"jobs": [held, told], "errors": []}))
    assert [job.reason for job in jobs] == ["JobHeldUser", "job requeued in held state"]
