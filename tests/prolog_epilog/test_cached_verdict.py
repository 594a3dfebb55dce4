"""The verdict in memory: whole or old, and believed only where nobody else can have written it; the prolog reads it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resilio_hpc.core.errors import HealthError
from resilio_hpc.prolog_epilog.base.check import Fault, NodeVerdict, OnFail, Result
from resilio_hpc.prolog_epilog.hooks.hook_files import TEMPLATES, filled
from resilio_hpc.prolog_epilog.run.cached_verdict import NoVerdict, Refusal, VerdictCache, render
from resilio_hpc.prolog_epilog.run.health_run import withheld
from resilio_hpc.prolog_epilog.run.runner import RunMemory, StuckSince
from tests.support.requirements import need_root
from tests.support.waiting import PATIENCE_S

BOOT = "11111111-2222-3333-4444-555555555555"


def verdict(*faults: Fault, on_fail: OnFail = "drain", uptime_s: float = 1000.0, gpus: int = 0) -> NodeVerdict:
    status = "fail" if faults else "pass"
    result = Result(check="gpu-ecc", status=status, on_fail=on_fail, severity="error", faults=faults)  # type: ignore[arg-type]
    return NodeVerdict(
        node="n1", boot=BOOT, uptime_s=uptime_s, unix_s=1e9, results=(result,), gpus=gpus, leave_until_s=uptime_s + 180
    )  # fmt: skip


@pytest.fixture
def cache(tmp_path: Path) -> VerdictCache:
    (tmp_path / "run").mkdir(mode=0o755)
    made = VerdictCache(tmp_path / "run" / "health")
    made.write(verdict(Fault("it is broken", "dev 0")))
    return made


def test_what_was_written_is_read(cache: VerdictCache) -> None:
    assert cache.read(1010.0, 60.0, BOOT) == verdict(Fault("it is broken", "dev 0"))
    memory = RunMemory({"a": [1]}, {"b": StuckSince(1, 2, 3.0, "x")}, {"c": 4.0})
    cache.keep(memory, BOOT)
    assert cache.memory(BOOT) == memory
    assert cache.memory("another boot") == RunMemory()


@pytest.mark.parametrize(
    ("now_s", "boot", "why"),
    [(1100.0, BOOT, "100 s old"), (900.0, BOOT, "-100 s old"), (1010.0, "later", "before the node was started")],
)
def test_an_old_verdict_is_none(cache: VerdictCache, now_s: float, boot: str, why: str) -> None:
    with pytest.raises(NoVerdict, match=why):
        cache.read(now_s, 60.0, boot)


def test_nobody_elses_verdict_is_believed(cache: VerdictCache, tmp_path: Path) -> None:
    cache.directory.chmod(0o777)
    with pytest.raises(NoVerdict, match="cannot be trusted"):
        cache.read(1010.0, 60.0, BOOT)
    with pytest.raises(HealthError, match="mode 777: remove it"):
        cache.write(verdict())
    cache.directory.chmod(0o755)
    path = cache.directory / "verdict.json"
    path.chmod(0o666)
    with pytest.raises(NoVerdict, match="mode 666"):
        cache.read(1010.0, 60.0, BOOT)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(NoVerdict, match="cannot be trusted"):
        cache.read(1010.0, 60.0, BOOT)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(NoVerdict):
        cache.read(1010.0, 60.0, BOOT)


def test_a_directory_that_a_user_made_first_is_refused(cache: VerdictCache) -> None:
    need_root()
    os.chown(cache.directory, 20001, 20001)
    with pytest.raises(NoVerdict, match="user 20001"):
        cache.read(1010.0, 60.0, BOOT)
    with pytest.raises(HealthError, match="user 20001"):
        cache.prepare()


def test_only_one_runs_the_checks_and_the_lock_goes_with_it(cache: VerdictCache) -> None:
    with cache.locked() as first, cache.locked() as second:
        assert (first, second) == (True, False)
    with cache.locked() as third:
        assert third


# ---- the prolog, which reads the same


def prolog(cache: VerdictCache, root: Path, env: Mapping[str, str] | None = None, **settings: str) -> tuple[int, str]:
    """Run the real hook as slurmd would, without PATH; returns (exit code, what it said)."""
    values = {"DIR": str(cache.directory), "PROC": str(root / "proc"), "DEV": str(root / "dev"), **settings}
    script = root / "prolog.sh"
    script.write_text(filled((TEMPLATES / "prolog.sh").read_text(), values))
    done = subprocess.run(
        ["/bin/sh", str(script)],
        env={"SLURM_JOB_ID": "7", **(env or {})},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stderr


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """What the prolog sees of /proc and /dev: a node 1010 s after its boot, with two GPUs."""
    files = {
        "proc/uptime": "1010.50 9.0\n",
        "proc/sys/kernel/random/boot_id": BOOT + "\n",
        "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 900 kB\n",
        "dev/nvidia0": "",
        "dev/nvidia1": "",
        "dev/nvidiactl": "",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


BAD = Fault("1 uncorrected ECC error", "GPU-1", 1)


@pytest.mark.parametrize(
    ("found", "env", "code", "said"),
    [
        (verdict(), {}, 0, ""),
        (verdict(gpus=2), {}, 0, ""),
        (verdict(gpus=3), {}, 1, "2 of 3 GPU devices"),
        (verdict(BAD, on_fail="warn"), {}, 0, ""),
        (verdict(BAD, on_fail="drain"), {}, 1, "drain gpu-ecc: 1 uncorrected ECC error"),
        (verdict(BAD, on_fail="fail"), {}, 1, "fail gpu-ecc"),
        (verdict(BAD, on_fail="evict"), {"SLURM_JOB_GPUS": "0"}, 0, ""),
        (verdict(BAD, on_fail="evict"), {"SLURM_JOB_GPUS": "0,1"}, 1, "evict 1 GPU-1 gpu-ecc"),
        (verdict(BAD, on_fail="evict"), {"SLURM_JOB_GPUS": "10,11"}, 0, ""),
        (verdict(BAD, on_fail="evict"), {"SLURM_JOB_GPUS": "0-3"}, 1, "evict 1"),
        (verdict(BAD, on_fail="evict"), {}, 0, ""),
        (verdict(Fault("down", "mlx5_0/1"), on_fail="evict"), {}, 1, "evict -1 mlx5_0/1"),
        (withheld(verdict(BAD), "a storm of drains"), {}, 0, ""),
        (verdict(uptime_s=50.0), {}, 0, "960 s old"),
        (verdict(uptime_s=2000.0), {}, 0, "-990 s old"),
        (msgspec.structs.replace(verdict(BAD), boot="other"), {}, 0, "before the node was started"),
    ],
)
def test_the_prolog_does_what_the_verdict_says(
    cache: VerdictCache, root: Path, found: NodeVerdict, env: dict[str, str], code: int, said: str
) -> None:
    cache.write(found)
    assert prolog(cache, root, env)[0] == code
    told = prolog(cache, root, env)[1]
    assert said in told if said else told == ""
    assert prolog(cache, root, env, MODE="observe")[0] == 0


@pytest.mark.parametrize(
    ("on_fail", "refused"),
    [
        ("drain", Refusal(1010.0, "7", "gpu-ecc", "drain gpu-ecc: 1 uncorrected ECC error")),
        ("fail", Refusal(1010.0, "7", "gpu-ecc", "fail gpu-ecc: 1 uncorrected ECC error")),
        ("evict", Refusal(1010.0, "7", "gpu-ecc", "evict 1 GPU-1 gpu-ecc: 1 uncorrected ECC error")),
        ("warn", None),
    ],
)
def test_a_prolog_that_fails_notes_for_which_check(
    cache: VerdictCache, root: Path, on_fail: OnFail, refused: Refusal | None
) -> None:
    cache.write(verdict(BAD, on_fail=on_fail))
    prolog(cache, root, {"SLURM_JOB_GPUS": "1"}, MODE="observe")
    assert cache.refusal() is None
    prolog(cache, root, {"SLURM_JOB_GPUS": "1"})
    assert cache.refusal() == refused
    cache.write(verdict(gpus=2))
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 10 kB\n")
    prolog(cache, root)
    assert cache.refusal() == Refusal(1010.0, "7", "memory-free", "only 0 MiB of memory are available")


@pytest.mark.parametrize("text", ["", "x 7 gpu-ecc why", "1010 7", "1010 7 GPU! why", "\u0663 7 gpu-ecc why"])
def test_a_note_that_cannot_be_read_is_none(cache: VerdictCache, text: str) -> None:
    (cache.directory / "refused").write_text(text)
    assert cache.refusal() is None
    (cache.directory / "refused").write_text("1010 7 gpu-ecc why")
    (cache.directory / "refused").chmod(0o666)
    assert cache.refusal() is None


@pytest.mark.parametrize("leave_until_s", [0.0, 1010.0, 900.0])
@pytest.mark.parametrize("on_fail", ["evict", "fail", "drain"])
def test_without_leave_of_the_storm_breaker_no_prolog_fails(
    cache: VerdictCache, root: Path, on_fail: OnFail, leave_until_s: float
) -> None:
    cache.write(msgspec.structs.replace(verdict(BAD, on_fail=on_fail), leave_until_s=leave_until_s))
    code, said = prolog(cache, root, {"SLURM_JOB_GPUS": "1"})
    assert code == 0 and "passes, without leave of the storm breaker" in said and "1 uncorrected ECC error" in said
    assert cache.take_request()  # whoever can give leave looks anew
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 10 kB\n")
    assert prolog(cache, root)[0] == 0


def test_no_leave_comes_with_a_verdict_that_is_withheld(cache: VerdictCache) -> None:
    assert "leave 1180" in render(verdict(BAD)).splitlines()
    assert "leave" not in render(withheld(verdict(BAD), "a storm of drains"))


def test_without_a_verdict_the_prolog_passes_and_asks_for_one_unless_the_site_says_otherwise(
    cache: VerdictCache, root: Path
) -> None:
    (cache.directory / "verdict").unlink()
    assert prolog(cache, root) == (0, "resilio prolog: job 7: warning: there is no verdict yet\n")
    assert cache.take_request()
    assert prolog(cache, root, MISSING="fail")[0] == 1
    assert "warning: there is no verdict yet" in (cache.directory / "log").read_text()


def test_the_prolog_believes_no_forged_verdict(cache: VerdictCache, root: Path) -> None:
    cache.directory.chmod(0o777)
    assert "not believed" in prolog(cache, root)[1]
    cache.directory.chmod(0o755)
    path = cache.directory / "verdict"
    path.chmod(0o664)
    assert "not believed" in prolog(cache, root)[1]
    path.chmod(0o644)
    assert prolog(cache, root)[0] == 1
    path.rename(root / "elsewhere")
    path.symlink_to(root / "elsewhere")
    assert "not believed" in prolog(cache, root)[1]


def test_the_prolog_knows_memory_that_is_short_now(cache: VerdictCache, root: Path) -> None:
    cache.write(verdict())
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 10 kB\n")
    assert prolog(cache, root) == (1, "resilio prolog: job 7: fails: only 0 MiB of memory are available\n")


def test_the_prolog_survives_a_node_that_shows_nothing(cache: VerdictCache, root: Path) -> None:
    for name in ("uptime", "meminfo", "sys/kernel/random/boot_id"):
        (root / "proc" / name).unlink()
    code, said = prolog(cache, root)
    assert code == 0 and "old" in said


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=30)


@settings(max_examples=15)
@given(st.integers(0, 400), TEXT)
def test_a_torn_or_altered_verdict_is_damaged_and_never_runs(
    tmp_path_factory: pytest.TempPathFactory, cut: int, noise: str
) -> None:
    folder = tmp_path_factory.mktemp("torn")
    torn = VerdictCache(folder / "run" / "health")
    (folder / "run").mkdir()
    torn.write(verdict(BAD))
    path = torn.directory / "verdict"
    whole = path.read_text()
    path.write_text(whole[: cut % len(whole)] + noise.replace("end", "") + "$(touch /tmp/never)`reboot`")
    for name in ("proc", "dev"):
        (folder / name).mkdir()
    (folder / "proc/uptime").write_text("1010.0 1.0\n")
    (folder / "proc/meminfo").write_text("")
    code, said = prolog(torn, folder)
    assert (code, "damaged" in said) == (0, True), said


def test_evidence_cannot_forge_lines_of_the_verdict() -> None:
    text = render(verdict(Fault("x\naction none\nend\n\x1b[31m", "GPU 1\nend", 1), on_fail="evict"))
    assert text.splitlines()[-2].startswith("evict 1 GPU_1_end gpu-ecc: x action none end ?[31m")
    assert text.splitlines().count("end") == 1
