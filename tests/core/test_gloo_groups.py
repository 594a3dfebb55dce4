"""Ranks that have finished end: without our help torch's gloo backend deadlocked within three of these lives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.core import gloo_groups
from resilio_hpc.core.process import run
from resilio_hpc.launch.workers.forking import rank_main
from resilio_hpc.launch.workers.rank_notes import may_wait_s
from tests.support.environments import SUPPORT, scrubbed
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("lives", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_ranks_of_a_ddp_script_always_end(lives: int, tmp_path: Path) -> None:
    program = SUPPORT / "core" / "gloo_lives.py"
    environment = scrubbed(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    run([sys.executable, str(program), str(tmp_path), str(lives)], timeout_s=lives * PATIENCE_S, env=environment)


def test_groups_that_are_there_already_are_kept_too(tmp_path: Path) -> None:
    """As they are when a script calls ``train.attach`` after ``init_process_group``."""
    program = """
import sys
import torch.distributed as dist
from resilio_hpc import train
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
group = dist.group.WORLD
before = sys.getrefcount(group)
train.attach()
after_first = sys.getrefcount(group)
train.attach()
print(after_first - before, sys.getrefcount(group) - after_first)
dist.destroy_process_group()
"""
    done = run([sys.executable, "-c", program, str(tmp_path / "store")], timeout_s=PATIENCE_S)
    assert done.stdout.split() == ["2", "0"], "one in the list of them, and one that even the list's end leaves"


def test_a_rank_that_is_executed_anew_keeps_them_without_a_word_of_ours(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("""
import sys
finders = len(sys.meta_path)
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
print(hasattr(c10d._new_process_group_helper, "__wrapped__"))
print(finders - len(sys.meta_path), "resilio_hpc" in sys.modules)
""")
    done = run([sys.executable, "-u", rank_main.__file__, "script", str(script)], timeout_s=PATIENCE_S)
    assert done.stdout.split() == ["True", "1", "False"]


@pytest.mark.parametrize("late", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_script_may_make_its_default_group_again(late: int, tmp_path: Path) -> None:
    """One rank looks for its peer's address before the peer has written it: torch left the former group's there."""
    (tmp_path / "again.py").write_text(f"""
import datetime, os, time
import torch
import torch.distributed as dist
sums = []
for time_of in range(3):
    if time_of and os.environ["RANK"] == "{late}":
        time.sleep(0.5)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={PATIENCE_S}))
    group = dist.new_group([0, 1])
    value = torch.ones(1) * (dist.get_rank() + 1)
    dist.all_reduce(value)
    dist.all_reduce(value, group=group)
    sums.append(value.item())
    dist.destroy_process_group()
print("sums", sums, flush=True)
""")
    done = run(
        [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--nproc-per-node", "2", "again.py"],
        timeout_s=3 * PATIENCE_S, env=scrubbed(RESILIO_LOCAL_NODES="1", GLOO_SOCKET_IFNAME="lo"), cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout.count("sums [6.0, 6.0, 6.0]") == 2, done.stdout


def test_a_rank_that_makes_its_group_again_meets_one_that_has_just_been_started(tmp_path: Path) -> None:
    """As under the policy that starts failed ranks again alone: the script says under which keys they meet."""
    script = tmp_path / "meet.py"
    script.write_text("""
import sys
import torch
import torch.distributed as dist
store, rank = dist.FileStore(sys.argv[1]), int(sys.argv[2])
for attempt, size in ((0, 1), (1, 2))[rank:]:
    dist.init_process_group("gloo", store=dist.PrefixStore(str(attempt), store), rank=rank, world_size=size)
    value = torch.ones(1)
    dist.all_reduce(value)
    dist.destroy_process_group()
print(value.item())
""")
    argv = [sys.executable, "-u", rank_main.__file__, "script", str(script), str(tmp_path / "store")]
    ranks = [run_beside([*argv, str(rank)]) for rank in range(2)]
    assert [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks] == ["2.0\n", "2.0\n"]


@pytest.mark.parametrize(("proposed", "told"), [("", "1800"), ("2400", "2400"), ("3600", "1800")])
def test_how_long_torch_lets_a_rank_wait_is_written_down(proposed: str, told: str, tmp_path: Path) -> None:
    """The longest limit of its groups, but for one that the launcher has proposed: gloo's own is 1800 s."""
    script = tmp_path / "plain.py"
    script.write_text("""
import datetime, os, sys
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
dist.new_group([0], timeout=datetime.timedelta(seconds=int(os.environ["LIMIT"])))
dist.new_group([0], timeout=datetime.timedelta(seconds=60))
print(os.getpid())
""")
    limit = proposed or "1200"
    environment = scrubbed(
        TORCHELASTIC_ERROR_FILE=str(tmp_path / "0.json"), LIMIT=limit,
        RESILIO_COLLECTIVE_TIMEOUT_S=limit if proposed == "3600" else "660",
    )  # fmt: skip
    argv = [sys.executable, "-u", rank_main.__file__, "script", str(script), str(tmp_path / "store")]
    pid = int(run(argv, timeout_s=PATIENCE_S, env=environment).stdout)
    assert may_wait_s(tmp_path / "0.json", pid) == float(told)
    assert may_wait_s(tmp_path / "0.json", pid + 1) == 0.0


def test_it_is_put_in_place_once() -> None:
    import torch.distributed.distributed_c10d as c10d

    before = c10d._new_process_group_helper
    try:
        gloo_groups.keep_alive()
        first = c10d._new_process_group_helper
        gloo_groups.keep_alive()
        assert c10d._new_process_group_helper is first
        assert first is not before
    finally:
        c10d._new_process_group_helper = before


@pytest.mark.slow
def test_a_process_that_goes_on_frees_groups_that_are_broken(tmp_path: Path) -> None:
    """Two ranks, again and again: a collective of which one has no peer is broken, and nothing of the group is left."""
    done = [
        run_beside([sys.executable, str(SUPPORT / "core" / "gloo_rounds.py"), str(tmp_path), str(rank)])
        for rank in range(2)
    ]
    said = [process.communicate(timeout=PATIENCE_S)[0].split() for process in done]
    assert [process.returncode for process in done] == [0, 0]
    assert said[0] == said[1] == ["left", "0", "threads", "0", "descriptors", "0"]


def run_beside(argv: list[str]) -> subprocess.Popen[str]:
    environment = scrubbed(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    return subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
