"""Dumps of PyTorch's flight recorder: real ones of ranks over gloo, and hostile ones."""

from __future__ import annotations

import json
import pickle  # noqa: TID251 - what PyTorch writes
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core.errors import UsageError
from resilio_hpc.diagnose.hangs import flight_recorder
from resilio_hpc.diagnose.hangs.blame import HangBlame, HangKind, blame
from tests.support.environments import SUPPORT, scrubbed

RANKS = SUPPORT / "diagnose" / "recorded_ranks.py"


def recorded(folder: Path) -> HangBlame:
    dumps = [flight_recorder.read(path) for path in sorted(folder.glob("nccl_trace_rank_*"))]
    return blame([one.calls for one in dumps], flight_recorder.members_of(dumps))


def hang(folder: Path, how: str) -> None:
    subprocess.run([sys.executable, RANKS, folder, how], env=scrubbed(), check=True, timeout=200, capture_output=True)


@pytest.mark.slow
def test_real_ranks_of_which_one_does_not_enter(tmp_path: Path) -> None:
    hang(tmp_path, "absent")
    found = recorded(tmp_path)
    assert (found.kind, found.ranks, found.waiting) == (HangKind.ABSENT, (1,), (0, 2, 3))
    assert found.call is not None
    assert found.call.place.startswith("recorded_ranks.py:")
    (tmp_path / "nccl_trace_rank_1").unlink()  # a process that is stopped writes none
    assert recorded(tmp_path).ranks == (1,)


@pytest.mark.slow
def test_real_ranks_of_which_one_calls_with_another_size(tmp_path: Path) -> None:
    hang(tmp_path, "mismatch")
    found = recorded(tmp_path)
    assert (found.kind, found.ranks) == (HangKind.MISMATCH, (3,))


def entry(**fields: object) -> dict[str, object]:
    usual = {
        "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[2, 4]], "input_dtypes": ["Float"], "state": "started", "is_p2p": False, "frames": [],
    }  # fmt: skip
    return {**usual, **fields}


def whole(*entries: dict[str, object]) -> dict[str, object]:
    return {
        "version": "2.10",
        "comm_lib_version": "",
        "pg_config": {"": {"ranks": "[0, 1, 2]"}},
        "entries": list(entries),
    }


@pytest.mark.parametrize("form", ["pickle", "json"])
def test_both_forms_say_the_same(form: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_7"
    frames = [{"filename": "/x/site-packages/torch/a.py", "line": 1}, {"filename": "/me/train.py", "line": 88}]
    content = whole(entry(frames=frames), entry(collective_seq_id=2, state="completed"))
    path.write_bytes(pickle.dumps(content) if form == "pickle" else json.dumps(content).encode())
    assert flight_recorder.is_dump(path)
    found = flight_recorder.read(path)
    (calls,) = found.calls.calls.values()
    assert (found.calls.rank, list(found.members.values())) == (7, [(0, 1, 2)])
    assert [(one.sequence, one.signature, one.completed, one.place) for one in calls] == [
        (1, "all_reduce Float 8", False, "train.py:88"), (2, "all_reduce Float 8", True, ""),
    ]  # fmt: skip


def test_sends_know_their_peer_and_gathers_have_no_common_size(tmp_path: Path) -> None:
    path = tmp_path / "dump_0"
    path.write_bytes(
        pickle.dumps(
            whole(
                entry(is_p2p=True, p2p_seq_id=3, profiling_name="nccl:send 0->2"),
                entry(profiling_name="nccl:all_gather"),
            )
        )
    )
    (calls,) = flight_recorder.read(path).calls.calls.values()
    assert [(one.op, one.peer, one.shape) for one in calls] == [("all_gather", -1, ""), ("send", 2, "Float 8")]
    group = {"1": {"ranks": "[4, 6]"}}
    inside = entry(is_p2p=True, profiling_name="nccl:send 0->1", process_group=("1", "pp"))
    unknown = entry(is_p2p=True, profiling_name="nccl:coalesced", process_group=("1", "pp"))
    path.write_bytes(pickle.dumps({**whole(inside, unknown), "pg_config": group}))
    (calls,) = flight_recorder.read(path).calls.calls.values()
    assert [one.peer for one in calls] == [6]  # ranks of a group are numbered within it


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (eval, ("1/0",))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (pickle.dumps(Evil()), "it names builtins.eval"),
        (b"\x80\x02garbage", "no dump"),
        (b"\x80", "no dump"),
        (b"{", "no dump"),
        (pickle.dumps([1]), "it has no entries"),
        (pickle.dumps({"entries": 3}), "it has no entries"),
        (b"", "no dump"),
    ],
)
def test_what_is_no_dump_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        flight_recorder.read(path)


def test_fields_of_the_wrong_kind_do_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "nccl_trace_rank_0"
    odd = entry(
        input_sizes=[3, ["x"], None], input_dtypes=[None], frames=[3, {}], collective_seq_id="x", process_group=()
    )
    path.write_bytes(pickle.dumps({**whole(odd, entry(process_group=None)), "pg_config": {"0": 3}}))
    found = flight_recorder.read(path)
    assert sum(map(len, found.calls.calls.values())) == 2


def test_a_name_without_a_rank_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "dump"
    path.write_bytes(pickle.dumps(whole()))
    assert not flight_recorder.is_dump(path)
    with pytest.raises(UsageError, match="ends in the rank's number"):
        flight_recorder.read(path)
