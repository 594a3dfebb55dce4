"""``resilio ckpt export`` and ``import``: what a person and a program see, also when it is interrupted."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from resilio_hpc import ckpt
from resilio_hpc.cli.main import main
from tests.support.cli.saved_steps import alone, copy_of, save_steps
from tests.support.environments import SUPPORT, scrubbed

safetensors_torch = pytest.importorskip("safetensors.torch")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def state_of(step: int) -> dict[str, Any]:
        return {"w": torch.full((500, 3), step), "n": frozenset({step})}

    return save_steps(tmp_path_factory.mktemp("saved") / "checkpoints", state_of)


@pytest.fixture
def directory(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    alone(monkeypatch)
    return copy_of(saved, tmp_path)


def call(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    try:
        code = main(["ckpt", *map(str, argv)])
    except SystemExit as stop:
        code = int(stop.code or 0)
    said = capsys.readouterr()
    return code, re.sub(r" in [\d.]+ s$", "", said.out, flags=re.MULTILINE), said.err


def in_a_process(*argv: object, before: str = "", **more: Any) -> subprocess.Popen[str]:
    words = ["ckpt", *map(str, argv)]
    code = f"{before}\nimport sys\nfrom resilio_hpc.cli.main import main\nsys.exit(main({words!r}))"
    return subprocess.Popen([sys.executable, "-c", code], text=True, **more)


def test_export_and_import_say_what_they_did(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target, other = directory.parent / "model.pt", directory.parent / "other"
    assert call(capsys, "export", directory, target, "--dry-run") == (
        0, f"step 20 (1 tensors, 12 kB): would be exported to {target}\n", "",
    )  # fmt: skip
    assert not target.exists()
    assert call(capsys, "export", directory, target, 10) == (
        0, f"step 10 (1 tensors, 12 kB): exported to {target}\n  frozensets made sets: 1\n", "",
    )  # fmt: skip
    assert torch.load(target, weights_only=True)["w"][0, 0] == 10
    note = "  any number of processes can restore it, with Checkpointer(…, layout=REPLICATED)\n"
    assert call(capsys, "import", target, other, 3, "--dry-run") == (
        0, f"{target} (1 tensors, 12 kB): would become step 3 of {other}\n{note}", "",
    )  # fmt: skip
    assert not other.exists()
    assert call(capsys, "import", target, other, 3) == (
        0, f"{target} (1 tensors, 12 kB): imported and verified as step 3 of {other}\n{note}", "",
    )  # fmt: skip
    assert ckpt.Checkpointer(other, layout=ckpt.REPLICATED).restore()[0] == 3  # type: ignore[index]
    assert call(capsys, "verify", other)[0] == 0
    assert "with Checkpointer(…)\n" in call(capsys, "import", target, other, 4, "--layout", "own")[1]
    assert ckpt.Checkpointer(other).restore({"w": torch.zeros(500, 3, dtype=torch.int64), "n": 0})[0] == 4  # type: ignore[index]


def test_programs_get_json(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = directory.parent / "dcp"
    code, out, err = call(capsys, "export", directory, target, "--json")
    found = json.loads(out)
    assert (code, err, found.pop("seconds") >= 0) == (0, "", True)
    assert found == {"step": 20, "target": str(target), "format": "dcp", "tensors": 1, "size_bytes": 12000,
                     "notes": ["frozensets made sets: 1"], "dry_run": False}  # fmt: skip
    code, out, err = call(capsys, "import", target, directory, 30, "--json", "--layout", "own")
    found = json.loads(out)
    assert (code, err, found["step"], found["layout"], found["tensors"], found["format"]) == (
        0,
        "",
        30,
        "own",
        1,
        "dcp",
    )


def test_a_run_directory_is_as_good_as_its_checkpoints(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = directory.parent / "run"
    run.mkdir()
    directory.rename(run / "checkpoints")
    (run / "run.json").write_text("{}")
    assert call(capsys, "export", run, directory.parent / "a.safetensors")[0] == 0
    assert call(capsys, "import", directory.parent / "a.safetensors", run, 30)[0] == 0
    assert (run / "checkpoints" / "step-0000000030").is_dir()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("export", "{}", "{}/../model.onnx"), "does not tell its format; give --format torch, safetensors or dcp"),
        (("export", "{}", "{}/../nowhere/x.pt"), "is not a directory; make it first"),
        (("export", "{}", "{}", "--format", "torch"), "is a directory"),
        (("export", "{}", "{}"), "exists; remove it, or say --overwrite"),
        (("export", "{}", "{}", "--overwrite"), "is not a DCP folder, and so not replaced by one"),
        (("export", "{}", "x.pt", "7"), "there is no step 7 in"),
        (("export", "{}", "x.pt", "--rank", "1"), "step 20 has ranks 0 to 0, not 1"),
        (("export", "{}", "x.pt", "--rank", "-1"), "step 20 has ranks 0 to 0, not -1"),
        (("export", "{}", "x.npz", "--format", "numpy"), "'numpy' is not known: "),
        (("export", "/nowhere", "x.pt"), "/nowhere is not a directory"),
        (("import", "/nowhere/x.pt", "{}", "30"), "/nowhere/x.pt does not exist"),
        (("import", "/etc/passwd", "{}", "30", "--format", "dcp"), "is a file, and so not of format dcp"),
        (("import", "/etc", "{}", "30"), "is no DCP folder: it has no .metadata"),
        (("import", "x.pt", "{}", "20"), "step 20 is in"),
        (("import", "x.pt", "{}", "--", "-1"), "step -1 is not a whole number from 0 on"),
        (("import", "x.pt", "{}"), "required: STEP"),
        (("import", "x.pt", "/etc/passwd", "1"), "/etc/passwd is not a directory"),
    ],
)
def test_a_mistake_is_told_in_a_line(
    directory: Path, capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    code, out, err = call(capsys, *(word.replace("{}", str(directory)) for word in argv))
    assert (code, out) == (2, "")
    assert said in err
    assert "Traceback" not in err
    assert sorted(path.name for path in directory.iterdir()) == ["latest", "step-0000000010", "step-0000000020"]


def test_damage_is_told_in_a_line(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = directory / "step-0000000020" / "node-0.h5"
    data = bytearray(path.read_bytes())
    at = data.find(bytes((20, 0, 0, 0, 0, 0, 0, 0)) * 3)
    data[at] ^= 1
    path.write_bytes(data)
    target = directory.parent / "a.safetensors"
    code, out, err = call(capsys, "export", directory, target)
    assert (code, out) == (1, "")
    assert err == "resilio: error: step 20: tensor w does not match its checksum at byte 0\n"
    target.write_bytes(b"garbage")
    code, out, err = call(capsys, "import", target, directory, 30)
    assert (code, out) == (1, "")
    assert "is no whole safetensors file" in err


@pytest.mark.parametrize(
    ("missing", "argv", "said"),
    [
        ("torch", ("export", "{}", "x.pt"),
         "writing torch files and DCP folders needs torch: pip install 'resilio_hpc[torch]'"),
        ("torch", ("import", "{pt}", "{}", "30"), "reading torch files needs torch: pip install 'resilio_hpc[torch]'"),
        ("safetensors", ("import", "{st}", "{}", "30"),
         "reading safetensors files needs safetensors: pip install 'resilio_hpc[safetensors]'"),
    ],
)  # fmt: skip
def test_a_library_that_is_missing_is_named(
    directory: Path, capsys: pytest.CaptureFixture[str], missing: str, argv: tuple[str, ...], said: str
) -> None:
    files = {"{pt}": directory.parent / "a.pt", "{st}": directory.parent / "a.safetensors", "{}": directory}
    assert all(call(capsys, "export", directory, path)[0] == 0 for name, path in files.items() if name != "{}")
    done = in_a_process(
        *(files.get(word, word) for word in argv), before=f"import sys\nsys.modules[{missing!r}] = None",
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=directory.parent,
    )  # fmt: skip
    out, err = done.communicate()
    assert (done.returncode, out, err) == (2, "", f"resilio: error: {said}\n")
    assert not (directory / "step-0000000030").exists()


def test_safetensors_are_written_without_any_of_those_libraries(directory: Path) -> None:
    target = directory.parent / "a.safetensors"
    block = "import sys\nfor name in ('torch', 'h5py', 'safetensors'): sys.modules[name] = None"
    assert in_a_process("export", directory, target, before=block, stdout=subprocess.DEVNULL).wait() == 0
    assert torch.equal(safetensors_torch.load_file(target)["w"], torch.full((500, 3), 20))


def test_an_export_that_is_ended_leaves_nothing(directory: Path) -> None:
    cases = [(name, number) for name in ("a.safetensors", "a.pt", "dcp") for number in (signal.SIGTERM, signal.SIGINT)]
    argv = [sys.executable, SUPPORT / "cli" / "ended_exports.py", directory]
    argv += [str(word) for name, number in cases for word in (name, int(number))]
    out = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, env=scrubbed()).stdout
    for (name, number), line in zip(cases, out.splitlines(), strict=True):
        found = json.loads(line)
        assert found["said"] == "reading\n", (name, number)
        assert any(entry.startswith(".resilio-export-") for entry in found["before"]), (name, number)
        assert (found["code"], found["after"]) == (128 + number, [directory.name]), (name, number)


def test_on_a_terminal_there_is_progress(directory: Path) -> None:
    ours, theirs = pty.openpty()
    argv = ("export", directory, directory.parent / "a.safetensors")
    done = in_a_process(*argv, stderr=theirs, stdout=subprocess.DEVNULL, env=scrubbed(TERM="xterm"))
    assert done.wait() == 0
    os.close(theirs)
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    assert "step 20" in shown
    assert "kB" in shown
