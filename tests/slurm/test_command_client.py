"""Which command is asked, what when it cannot answer in JSON, and what every kind of silence means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from resilio_hpc.core.errors import CommandError, SlurmError
from resilio_hpc.core.process import Completed
from resilio_hpc.slurm.client.answers import Garbled
from resilio_hpc.slurm.client.command_client import CommandClient, parse_series
from resilio_hpc.slurm.client.slurm_errors import Unanswered
from resilio_hpc.slurm.client.text_output import NODE_COLUMNS

SAMPLES = Path(__file__).with_name("samples")


@dataclass
class Script:
    """A Runner that answers by a command's beginning, and raises on what it was not told of."""

    answers: dict[str, str | CommandError]
    asked: list[list[str]] = field(default_factory=list)

    def __call__(self, argv: Sequence[str], timeout_s: float, extra: Mapping[str, str]) -> Completed:
        words = list(argv)
        self.asked.append(words)
        line = " ".join(words)
        for begins, answer in self.answers.items():
            if line.startswith(begins):
                if isinstance(answer, CommandError):
                    raise answer
                return Completed(tuple(words), 0, answer.replace("MARK", mark_of(words)), "")
        raise AssertionError(f"not in the script: {line}")


def mark_of(words: list[str]) -> str:
    return words[-1].rpartition(":")[2]


def failed(stderr: str, code: int | None = 1) -> CommandError:
    return CommandError(["x"], code, stderr=stderr, why="" if code else "no answer within 20 s")


ROW = "MARK".join(["n9", "idle", *["(null)"] * (len(NODE_COLUMNS) - 2), "\n"])


def test_each_version_is_asked_its_own_way() -> None:
    old = Script({"sinfo -V": "slurm-wlm 22.05.8", "sinfo -a --json": (SAMPLES / "nodes_22.05.json").read_text()})
    assert len(CommandClient(old).nodes()) == 4
    new = Script({"sinfo -V": "slurm 26.05.5", "scontrol -a show nodes": (SAMPLES / "nodes_26.05.json").read_text()})
    client = CommandClient(new)
    assert [node.name for node in client.nodes(["n2"])] == ["n2"]
    assert len(client.nodes(["n2", "n3"])) == 2
    assert new.asked == [
        ["sinfo", "-V"],
        ["scontrol", "-a", "show", "nodes", "n2", "--json"],
        ["scontrol", "-a", "show", "nodes", "--json"],
    ]


@pytest.mark.parametrize(
    "json_answer", [failed("scontrol: unrecognized option '--json'"), failed("fatal: serializer plugin not found", 1)]
)
def test_a_slurm_without_json_is_asked_once_for_it(json_answer: CommandError) -> None:
    script = Script({"sinfo -V": "slurm 26.05.5", "scontrol -a show nodes": json_answer, "sinfo -a -h -N": ROW})
    client = CommandClient(script)
    assert [node.name for node in client.nodes()] == [node.name for node in client.nodes()] == ["n9"]
    assert sum("--json" in words for words in script.asked) == 1


def test_a_torn_answer_is_asked_for_again_in_a_table() -> None:
    script = Script({"sinfo -V": "slurm 26.05.5", "scontrol -a show nodes": '{"nodes": [{"na', "sinfo -a -h -N": ROW})
    client = CommandClient(script)
    assert client.nodes()[0].name == client.nodes()[0].name == "n9"
    assert sum("--json" in words for words in script.asked) == 2
    script.answers["sinfo -a -h -N"] = ROW[:-9]
    with pytest.raises(Garbled):
        client.nodes()


@pytest.mark.parametrize(
    "away",
    [failed("slurm_load_node error: Unable to contact slurm controller (connect failure)"), failed("", None),
     failed("error: slurm_receive_msg: Socket timed out on send/recv operation")],
)  # fmt: skip
def test_silence_is_an_error_that_says_so_and_no_empty_cluster(away: CommandError) -> None:
    everything = {"scontrol": away, "sinfo -a": away, "squeue": away, "sdiag": away}
    for version in ("slurm 22.05.8", "slurm 26.05.5"):
        client = CommandClient(Script({"sinfo -V": version, **everything}))
        questions = [client.nodes, client.jobs, client.partitions, client.node_updates]
        orders = [
            partial(client.orders.drain, ["n1"], "x"),
            partial(client.orders.update_job, "7", {"Comment": "x"}),
        ]
        for call in [*questions, *orders]:
            with pytest.raises(Unanswered):
                call()


def test_what_slurm_does_not_know_is_no_failure() -> None:
    script = Script(
        {
            "sinfo -V": "slurm 26.05.5",
            "scontrol -a show nodes": failed("Node nosuch not found"),
            "scontrol -a show jobs": failed("slurm_load_jobs error: Invalid job id specified"),
        }
    )
    client = CommandClient(script)
    assert client.nodes(["nosuch"]) == ()
    assert client.jobs(["99999"]) == ()


def test_a_refusal_is_no_silence() -> None:
    client = CommandClient(Script({"scontrol update": failed("slurm_update error: Invalid user id")}))
    with pytest.raises(SlurmError, match="Invalid user id") as refusal:
        client.orders.drain(["n1"], "x")
    assert not isinstance(refusal.value, Unanswered)


def test_versions() -> None:
    assert parse_series("slurm 26.05.5\n") == (26, 5)
    assert parse_series("slurm-wlm 22.05.8") == (22, 5)
    assert parse_series("slurm 27.11.0-0rc1") == (27, 11)
    with pytest.raises(Garbled, match="no version"):
        parse_series("command not found")
