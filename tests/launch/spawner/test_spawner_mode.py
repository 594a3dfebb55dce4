"""When ranks are forked and when they are executed, what is said about it, and the store beside them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import load_time_variables
from resilio_hpc.launch.workers.spawner import RESOLVER_OPTIONS, Exited, SpawnFailed, Started, StoreDied, StoreReady
from tests.support.environments import ROOT, scrubbed
from tests.support.waiting import PATIENCE_S


def test_a_zygote_has_one_thread_although_numpy_starts_some_and_holds_what_is_preloaded(
    make_bench, spawner_environment, tmp_path
) -> None:
    (tmp_path / "big.py").write_text("import os; loader = os.getpid()")
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    bench = make_bench(environment=spawner_environment(PYTHONPATH=python_path(tmp_path), **threads), preload=["big"])
    ready = bench.start()
    assert (ready.threads, ready.why_not_fork) == (1, "")
    source = "import big, numpy, os; a = numpy.ones((500, 500)); print((a @ a)[0, 0], big.loader == os.getppid())"
    assert bench.run(source).mode == "fork"
    assert bench.out() == "500.0 True\n"


def test_a_forked_rank_restores_without_importing_anything(make_bench, spawner_environment, tmp_path) -> None:
    bench = make_bench(environment=spawner_environment())
    bench.start()
    source = f"""
import sys
before = set(sys.modules)
import torch
from resilio_hpc import train
from resilio_hpc.ckpt import REPLICATED, Checkpointer
checkpointer = Checkpointer({str(tmp_path / "steps")!r}, layout=REPLICATED)
checkpointer.save(1, {{"a": torch.ones(3)}}).wait("committed")
print(checkpointer.restore()[0], sorted(set(sys.modules) - before))
"""
    assert bench.run(source).mode == "fork"
    assert bench.out() == "1 []\n"


def test_a_preload_that_forbids_forking_is_said_and_ranks_are_executed(
    make_bench, spawner_environment, tmp_path
) -> None:
    source = (
        "import subprocess, threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    (tmp_path / "bad.py").write_text(source + "; child = subprocess.Popen(['sleep', '1000'])")
    environment = spawner_environment(PYTHONPATH=python_path(tmp_path))
    bench = make_bench(environment=environment, preload=["bad"], torch=False)
    ready = bench.start()
    assert "threads" in ready.why_not_fork
    assert bench.run("print('runs all the same')").exit_code == 0, bench.err()
    started = bench.wait(Started)
    assert (started.mode, started.why) == ("exec", ready.why_not_fork)
    assert process_tree.children(bench.spawner.pid) == []


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", ""),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            "threads (1: python)",
        ),
        ("raise ValueError('no\\nlicence')", "preloading bad failed: ValueError: no licence"),
        ("import sys; sys.exit('unset')", "preloading bad failed: SystemExit: unset"),
        ("import absent_module", "preloading bad failed: ModuleNotFoundError: No module named 'absent_module'"),
        ("import subprocess as s; c = s.Popen(['cat'], stdin=s.PIPE)", "a preloaded module started processes ("),
        ("import torch; torch.initialised = True", "a preloaded module initialised CUDA"),
    ],
)
def test_what_forbids_forking_is_named_in_one_line(tmp_path, source, why) -> None:
    """In a process of its own; its torch is a stand-in that can say that CUDA is initialised."""
    (tmp_path / "torch.py").write_text("initialised = False\nclass cuda: is_initialized = lambda: initialised\n")
    (tmp_path / "bad.py").write_text(source)
    check = (
        "from resilio_hpc.launch.workers.forking import preload as p; "
        "print(p.import_all(['bad'], 0) or p.why_not_fork(), end='')"
    )
    env = scrubbed(PYTHONPATH=python_path(tmp_path))
    done = subprocess.run([sys.executable, "-c", check], env=env, stdout=subprocess.PIPE, text=True, check=True)
    assert why in done.stdout and bool(why) == bool(done.stdout)
    assert "\n" not in done.stdout


def python_path(*first: Path) -> str:
    return os.pathsep.join(map(str, (*first, ROOT)))


def test_our_own_package_is_preloaded_whole_and_a_users_only_as_far_as_it_imports(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("__all__ = ['gone']\n")
    check = (
        "import sys; from resilio_hpc.launch.workers.forking import preload as p; "
        f"print(p.import_all(['mine', 'resilio_hpc.ckpt'], False, {str(tmp_path)!r}), 'mine' in sys.modules, "
        "'resilio_hpc.ckpt.checkpointer' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", check], env=scrubbed(), capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


def test_an_environment_that_only_a_new_process_can_honour_means_exec(bench) -> None:
    exited = bench.run("import sys; print(sys.flags.hash_randomization)", env={"PYTHONHASHSEED": "0", "RANK": "3"})
    started = bench.wait(Started)
    assert (exited.mode, exited.exit_code, bench.out()) == ("exec", 0, "0\n")
    assert started.why == "PYTHONHASHSEED can only be set for a new process"


@pytest.mark.parametrize(
    ("spawner", "rank", "names"),
    [
        ({}, {"RANK": "0", "MASTER_ADDR": "n1", "CUDA_VISIBLE_DEVICES": "1", "NCCL_DEBUG": "INFO"}, []),
        ({}, {"OMP_NUM_THREADS": "4"}, []),
        ({}, {"OMP_PROC_BIND": "close", "LD_PRELOAD": "a.so"}, ["LD_PRELOAD", "OMP_PROC_BIND"]),
        ({"LD_PRELOAD": "a.so"}, {"LD_PRELOAD": "a.so"}, []),
        ({"MALLOC_ARENA_MAX": "1"}, {"MALLOC_ARENA_MAX": "2"}, ["MALLOC_ARENA_MAX"]),
    ],
)
def test_which_variables_need_a_new_process(spawner, rank, names) -> None:
    assert load_time_variables.differing(spawner, rank) == names


def test_a_command_is_executed_with_its_environment_directory_and_affinity(either) -> None:
    either.command("command", "sh", "-c", 'echo "$MINE $PWD"; exit 3', env={"MINE": "x"})
    assert either.wait_exit().exit_code == 3
    assert either.out() == f"x {either.directory}\n"
    assert either.wait(Started).why == "not a Python script"


@pytest.mark.parametrize(
    ("kind", "argv", "fields", "error"),
    [
        ("command", "no-such-program", {}, "no-such-program: no such program"),
        ("command", "./data", {}, "./data: no such program, or not executable"),
        ("script", "s.py", {"cwd": "/absent"}, "/absent: not a directory"),
        ("script", "s.py", {"stdout_path": "/absent/out"}, "/absent/out: No such file"),
        ("script", "s.py", {"stderr_path": "/absent/err"}, "/absent/err: No such file"),
    ],
)
def test_a_rank_that_cannot_start_is_said(bench, kind, argv, fields, error) -> None:
    (bench.directory / "data").write_text("")
    bench.command(kind, argv, **fields)
    assert bench.wait(SpawnFailed).error.startswith(error)


def test_an_affinity_that_this_machine_has_not_is_said_on_stderr(bench) -> None:
    path = bench.script("print('not reached')")
    bench.command("script", str(path), cpus=(4000,))
    assert bench.wait_exit().exit_code == 1
    assert bench.err().startswith("cannot start local rank 0: ")
    assert bench.out() == ""


def test_four_gloo_ranks_meet_through_the_store_and_meet_again_in_the_next_round(bench) -> None:
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        value = torch.tensor([1.0 + dist.get_rank()])
        dist.all_reduce(value)
        print(value.item())
        dist.destroy_process_group()
    """
    for round in range(2):
        port = bench.store_port(round)
        for rank in range(4):
            env = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
            env |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(round)}
            bench.spawn(source, rank=rank, env=env)
        bench.wait_exit(4 * (round + 1))
        assert [bench.out(rank) for rank in range(4)] == ["10.0\n" * (round + 1)] * 4, bench.err()
        bench.stop(grace_s=1)


def listening(port: int) -> bool:
    try:
        socket.create_connection(("localhost", port), timeout=PATIENCE_S).close()
    except OSError:
        return False
    return True


def test_a_store_opens_and_ends_without_a_zygote_too(exec_bench) -> None:
    port = exec_bench.store_port(0)
    assert listening(port)
    exec_bench.stop()
    assert not listening(port)


def test_the_next_rounds_store_may_be_open_before_the_stop_and_outlive_it(bench) -> None:
    first, second = bench.store_port(5), bench.store_port(6)
    bench.stop(keep_stores_from=6)
    assert (listening(first), listening(second)) == (False, True)
    third = bench.store_port(8)  # rounds before the one before end
    bench.stop(keep_stores_from=8)
    assert (listening(second), listening(third)) == (False, True)
    bench.stop()
    assert not listening(third)
    assert not [event for event in bench.seen if isinstance(event, StoreDied)]


def test_a_store_that_cannot_open_or_is_killed_is_said(bench) -> None:
    bench.spawner.open_store(0, "no-such-host.invalid")
    assert "no-such-host" in bench.wait(StoreDied, where=lambda event: event.round == 0).error
    bench.store_port(1)
    store = max(process_tree.children(bench.spawner.pid))
    process_tree.send([store], signal.SIGKILL)
    assert bench.wait(StoreDied, where=lambda event: event.round == 1).error.endswith("signal 9")
    assert [event.round for event in bench.seen if isinstance(event, StoreReady)] == [1]


def test_the_store_never_delays_ranks(bench) -> None:
    """A store host holds no descriptor of its spawner and none of its ranks': all end by themselves."""
    bench.store_port(0)
    assert bench.run("pass").exit_code == 0
    assert bench.wait(Exited).mode == "fork"


def test_the_resolver_is_told_to_repeat_a_lost_question_soon(make_bench, spawner_environment) -> None:
    source = "import os; print(os.environ['RES_OPTIONS'])"
    for given, expected in (({}, RESOLVER_OPTIONS), ({"RES_OPTIONS": "timeout:9"}, "timeout:9")):
        bench = make_bench(environment=spawner_environment(**given), use_zygote=False)
        bench.start()
        bench.run(source)
        assert bench.out().splitlines()[-1] == expected


def test_without_torch_nothing_imports_it_and_the_store_is_a_port_for_rank_0(make_bench) -> None:
    bench = make_bench(torch=False)
    assert bench.start().why_not_fork == ""
    port = bench.store_port(0)
    with socket.create_server(("localhost", port)):  # the launcher holds nothing there
        assert bench.run("import sys; print('torch' in sys.modules)").exit_code == 0
    assert bench.out() == "False\n"
    assert bench.wait(Started).mode == "fork"


def test_a_module_beside_the_script_is_not_taken_for_one_that_is_loaded(make_bench, tmp_path: Path) -> None:
    """A mistaken one would be found in the forked rank, and be another one than plain Python finds."""
    script = tmp_path / "own" / "train.py"
    script.parent.mkdir()
    script.write_text("import queue, token; print(queue.OWN, token.OWN)")
    for name in ("queue", "token"):
        (script.parent / f"{name}.py").write_text("OWN = 1")
    bench = make_bench(torch=False, program=("script", str(script)))
    assert "has another" in bench.start().why_not_fork
    bench.command("script", str(script))
    assert bench.wait_exit().exit_code == 0, bench.err()
    assert bench.out() == "1 1\n"


def test_a_script_that_sets_what_is_read_on_import_is_executed(make_bench, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.environ['OMP_PROC_BIND'] = 'true'\nimport numpy")
    bench = make_bench(torch=False, program=("script", str(script)))
    assert "sets OMP_PROC_BIND before it imports numpy" in bench.start().why_not_fork


def test_a_preloaded_module_may_be_beside_the_script(make_bench, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own/beside.py").write_text("VALUE = 5")
    program = ("script", str(tmp_path / "own/train.py"))
    bench = make_bench(torch=False, preload=("beside",), program=program)
    assert bench.start().why_not_fork == ""


def test_relative_entries_of_the_path_are_those_of_the_ranks_directory(
    make_bench, spawner_environment, tmp_path: Path
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/mine.py").write_text("VALUE = 7")
    (tmp_path / "top.py").write_text("VALUE = 8")
    environment = spawner_environment(PYTHONPATH=f"lib::{ROOT}")
    bench = make_bench(torch=False, environment=environment, cwd=str(tmp_path))
    assert bench.start().why_not_fork == ""
    bench.spawn("import mine, os, top; print(mine.VALUE, top.VALUE, os.environ['PYTHONPATH'])")
    assert bench.wait_exit().exit_code == 0, bench.err()
    assert bench.out() == f"7 8 lib::{ROOT}\n"
    assert bench.wait(Started).mode == "fork"


def test_a_package_that_reports_leaks_finds_none_at_a_ranks_end(make_bench, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text(
        "import os\n"
        "class Cycle:\n"
        "    def __init__(self): self.me = self\n"
        "    def __del__(self, write=os.write): write(1, b'collected')\n"
    )
    (tmp_path / "other.py").write_text("import triton; KEPT = triton.Cycle()")
    (tmp_path / "train.py").write_text("import other; del other.KEPT")
    program = ("script", str(tmp_path / "train.py"))
    bench = make_bench(torch=False, preload=("other",), program=program)
    assert bench.start().why_not_fork == ""
    bench.command(*program)
    assert bench.wait_exit().exit_code == 0, bench.err()
    assert bench.out() == "collected"
