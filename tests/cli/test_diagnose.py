"""``resilio diagnose``: logs, folders, runs and cases in; a paragraph or JSON out."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from resilio_hpc.cli import main as cli

ECC = "[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
PEER = "[rank1]: Connection closed by peer\n"


def run(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = cli.main(["diagnose", *map(str, words)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.out"
    log.write_text(PEER + ECC + PEER)
    code, out, _ = run(capsys, log)
    assert code == 0
    assert out.splitlines()[0] == "gpu_hardware: uncorrectable error in a GPU's memory (95% sure)"
    assert "train.out:2: RuntimeError" in "".join(out.splitlines())
    assert "beside it, 2 lines: a peer ended" in out


def test_json_names_the_line_and_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.out"
    log.write_text(ECC)
    answer = json.loads(run(capsys, log, "--json")[1])
    assert (answer["v"], answer["label"], answer["where"]) == (1, "gpu_hardware", f"{log}:1")
    assert "exclude" in answer["todo"]


def test_an_unknown_cause_has_an_exit_code_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.out"
    log.write_text(PEER)
    code, out, _ = run(capsys, log)
    assert code == 1
    assert out.startswith("unknown: only lines that follow from a failure (the lines do not decide)")


def test_a_folder_of_logs_and_only_the_end_of_a_long_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank0.log").write_text(PEER)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "rank1.log").write_text("x\n" * 9_000_000 + ECC)
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert "rank1.log:9000001" in "".join(line.strip() for line in out.splitlines())


def test_a_run_says_it_from_its_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "ledger").mkdir()
    (tmp_path / "logs" / "1" / "n1").mkdir(parents=True)
    (tmp_path / "logs" / "1" / "n1" / "0.log").write_text(PEER)
    events = [
        {"event": "rank_failed", "rank": 1, "node": "n1", "exit_code": 1, "message": "KeyError: 'lr'"},
        {"event": "committed", "step": 40},
        {"event": "rank_failed", "rank": 3, "node": "n2", "exit_code": 1, "message": "x", "traceback": f"a\n{ECC}"},
    ]
    lines = [json.dumps({"v": 1, "time": 1.0 + n, "writer": "a", **event}) for n, event in enumerate(events)]
    (tmp_path / "ledger" / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    for path in (tmp_path, tmp_path / "ledger", tmp_path / "ledger" / "a.jsonl"):
        path.chmod(path.stat().st_mode & ~0o022)
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert out.startswith("gpu_hardware")


def test_dumps_of_the_flight_recorder_name_the_rank_that_holds_up_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank, entered in enumerate((2, 1, 2)):
        calls = [
            {"process_group": ["0", "default_pg"], "collective_seq_id": number + 1, "profiling_name": "nccl:all_reduce",
             "input_sizes": [[8]], "input_dtypes": ["Float"], "state": "completed" if number == 0 else "started"}
            for number in range(entered)
        ]  # fmt: skip
        config = {"0": {"ranks": "[0, 1, 2]"}}
        (tmp_path / f"trace_{rank}").write_text(
            json.dumps({"comm_lib_version": "", "entries": calls, "pg_config": config})
        )
    code, out, _ = run(capsys, tmp_path)
    assert code == 0
    assert out.startswith("hang: rank 1 did not enter all_reduce number 2 of group 0 (default_pg)")
    assert "ranks 0, 2 wait in a call" in out
    answer = json.loads(run(capsys, tmp_path, "--json")[1])
    assert (answer["hang"]["kind"], answer["hang"]["ranks"]) == ("absent", [1])
    (tmp_path / "train.log").write_text(ECC)
    (tmp_path / "model_7.pkl").write_bytes(b"\x80\x04]\x94.")
    _, out, err = run(capsys, tmp_path)
    assert "passed over" in err and "model_7.pkl" in err
    assert out.startswith("hang: rank 1")
    assert "gpu_hardware: " in out


def test_cases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = {"a": [PEER, ECC], "b": [PEER], "c": []}
    made = [{"id": name, "label": "?", "lines": [{"text": text} for text in lines]} for name, lines in texts.items()]
    cases.write_text("".join(f"{json.dumps(case)}\n" for case in made))
    assert run(capsys, "--cases", cases, "--out", answers)[0] == 0
    found = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [(one["id"], one["label"], one["root"]) for one in found] == [
        ("a", "gpu_hardware", 1), ("b", "unknown", None), ("c", "unknown", None),
    ]  # fmt: skip
    assert all(isinstance(one["confidence"], float) and one["evidence"] for one in found)
    assert run(capsys, "--cases", cases)[1] == answers.read_text()


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "bad.jsonl").write_text('{"id": "a", "lines": []}\nnonsense\n')
    (tmp_path / "empty").mkdir()
    for words, said in (
        ([], "name a log"),
        ([tmp_path / "pipe.log"], "pipe"),
        ([tmp_path / "empty"], "has no logs"),
        (["no-such-run"], "does not exist"),
        (["--cases", tmp_path / "bad.jsonl"], "bad.jsonl, line 2: "),
        (["--cases", tmp_path / "missing.jsonl"], "No such file"),
        (["--out", tmp_path / "x"], "--out goes with --cases"),
        (["--cases", tmp_path / "bad.jsonl", "x"], "--cases goes alone"),
    ):
        code, _, err = run(capsys, *words)
        assert code == 2, words
        assert said in err, words
        assert len(err.splitlines()) == 1, words
