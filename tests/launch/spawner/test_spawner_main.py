"""A rank is a program of its own: what a script sees and leaves behind is what plain Python shows and leaves."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S

MIRROR = """
    import json, os, signal, sys, threading
    import __main__
    print(json.dumps({
        "name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path,
        "spec": __spec__ and [__spec__.name, __spec__.origin],
        "loader": type(__loader__).__name__, "globals": sorted(globals()), "main": __main__.__dict__ is globals(),
        "orig_argv": sys.orig_argv[1:], "cwd": os.getcwd(), "stdin": os.path.realpath("/proc/self/fd/0"),
        "threads": threading.active_count(), "main_thread": threading.current_thread() is threading.main_thread(),
        "stdout": [sys.stdout.encoding, sys.stdout.errors, sys.stdout.write_through, type(sys.stdout.buffer).__name__],
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE)],
        "mask": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
        "fds": sorted(os.listdir("/proc/self/fd"), key=int)[:3], "hook": str(sys.excepthook), "hash": hash("a") == 0,
        "umask": os.umask(0o22), "ppid": os.getppid() > 1,
    }, sort_keys=True))
"""


def plain(bench, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-u", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=bench.directory,
        env=scrubbed(OMP_NUM_THREADS="1"),
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_script_sees_what_plain_python_shows_it(either) -> None:
    path = either.script(MIRROR, "mirror.py")
    either.command("script", "mirror.py", "--lr", "1e-3", "a b")
    assert either.wait_exit().exit_code == 0, either.err()
    expected = json.loads(plain(either, "mirror.py", "--lr", "1e-3", "a b").stdout)
    assert json.loads(either.out()) == expected
    assert expected["file"] == str(path)


def test_a_module_sees_what_plain_python_shows_it(either) -> None:
    (either.directory / "package").mkdir()
    either.script("value = 7", "package/__init__.py")
    either.script("from package import value" + MIRROR.replace("\n    ", "\n"), "package/tool.py")
    either.command("module", "package.tool", "x")
    assert either.wait_exit().exit_code == 0, either.err()
    assert json.loads(either.out()) == json.loads(plain(either, "-m", "package.tool", "x").stdout)


def test_a_directory_with_a_main_file_is_a_script(either) -> None:
    (either.directory / "application").mkdir()
    either.script(MIRROR, "application/__main__.py")
    either.command("script", "application", "x")
    assert either.wait_exit().exit_code == 0, either.err()
    assert json.loads(either.out()) == json.loads(plain(either, "application", "x").stdout)


@pytest.mark.parametrize(
    ("source", "exit_code", "message"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit()", 0, ""),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit('no data set')", 1, "no data set\n"),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_exit_codes_are_plain_pythons(bench, source: str, exit_code: int, message: str) -> None:
    exited = bench.run(source)
    assert (exited.exit_code, exited.signal, bench.err()) == (exit_code, None, message)


FAILING = """
    import sys
    class Odd(ValueError): pass
    def inner():
        try:
            {}["key"]
        except KeyError as error:
            raise Odd("loss is\\x1b[31m nan") from error
    def outer():
        inner()  # the line that a reader looks for
    outer()
"""


def test_an_uncaught_exception_prints_plain_pythons_traceback_and_writes_the_error_file(either) -> None:
    path = either.script(FAILING, "failing.py")
    error_file = either.directory / "error.json"
    either.command("script", str(path), env={"TORCHELASTIC_ERROR_FILE": str(error_file)})
    assert either.wait_exit().exit_code == 1
    assert either.err() == plain(either, str(path)).stderr
    message = json.loads(error_file.read_text())["message"]
    assert message["message"].startswith("Odd: loss is")
    assert "the line that a reader looks for" in message["extraInfo"]["py_callstack"]


def test_an_error_file_that_the_script_wrote_stays(bench) -> None:
    error_file = bench.directory / "error.json"
    error_file.write_text('{"message": "mine"}')
    assert bench.run("1 / 0", env={"TORCHELASTIC_ERROR_FILE": str(error_file)}).exit_code == 1
    assert error_file.read_text() == '{"message": "mine"}'


@pytest.mark.parametrize("source", ["def f(:\n", "import absent_module_of_mine\n", "raise KeyboardInterrupt\n"])
def test_failures_before_and_beside_exceptions_look_like_plain_pythons(bench, source: str) -> None:
    path = bench.script(source, "bad.py")
    bench.command("script", str(path))
    exited = bench.wait_exit()
    expected = plain(bench, str(path))
    assert (-(exited.signal or 0) or exited.exit_code, bench.err()) == (expected.returncode, expected.stderr)


def test_a_missing_script_is_said_as_plain_python_says_it(bench) -> None:
    bench.command("script", "missing.py")
    assert bench.wait_exit().exit_code == 2
    assert bench.err() == plain(bench, "missing.py").stderr


def test_the_users_own_exception_hook_is_called(bench) -> None:
    source = "import sys; sys.excepthook = lambda kind, error, tb: print('hook', kind.__name__, tb.tb_lineno); 1 / 0"
    assert bench.run(source).exit_code == 1
    assert bench.out() == "hook ZeroDivisionError 1\n"


def test_finalisation_runs_exit_functions_threads_and_flushes_files(bench) -> None:
    bench.run(
        """
        import atexit, sys, threading, time
        atexit.register(print, "at exit")
        threading.Thread(target=lambda: (time.sleep(0.05), print("thread"))).start()
        unclosed = open("unclosed.txt", "w"); unclosed.write("kept")
        print("end of script")
        """
    )
    assert bench.out() == "end of script\nthread\nat exit\n"
    assert (bench.directory / "unclosed.txt").read_text() == "kept"


def test_spawned_and_forked_data_loaders_and_pickled_classes_of_main_work(bench) -> None:
    exited = bench.run(
        """
        import inspect, multiprocessing, pickle, torch
        from torch.utils.data import DataLoader, Dataset
        class Numbers(Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return torch.tensor(i)
        def double(x): return 2 * x
        if __name__ == "__main__":
            assert type(pickle.loads(pickle.dumps(Numbers()))) is Numbers
            assert inspect.getsource(double) == "def double(x): return 2 * x\\n"
            for how in ("fork", "spawn"):
                loader = DataLoader(Numbers(), num_workers=1, multiprocessing_context=how)
                print(how, [int(x) for x in loader])
            with multiprocessing.get_context("spawn").Pool(1) as pool: print(pool.map(double, [1, 2]))
        """
    )
    assert exited.exit_code == 0, bench.err()
    assert bench.out() == "fork [0, 1, 2, 3]\nspawn [0, 1, 2, 3]\n[2, 4]\n"


SEEDS = """
    import json, random, sys, tempfile, uuid
    import numpy, torch, multiprocessing
    print(json.dumps({
        "fixed": torch.Generator().initial_seed(),
        "fresh": [random.random(), float(numpy.random.rand()), tempfile.mktemp(), str(uuid.uuid4()),
                  multiprocessing.current_process().authkey.hex(), str(uuid.uuid1()),
                  torch.initial_seed(), float(torch.rand(1))],
    }))
"""


def test_seeds_are_a_fresh_interpreters(bench) -> None:
    """All of them drawn anew: two ranks that share one would shuffle and drop out alike. torch's CUDA seed is fixed."""
    for rank in range(2):
        bench.spawn(SEEDS, rank=rank)
    bench.wait_exit(2)
    ranks = [json.loads(bench.out(rank)) for rank in range(2)]
    fresh = json.loads(plain(bench, str(bench.directory / "script0.py")).stdout)
    assert ranks[0]["fixed"] == ranks[1]["fixed"] == fresh["fixed"]
    values = [value for result in (*ranks, fresh) for value in result["fresh"]]
    assert len(set(values)) == len(values)


def test_threads_affinity_and_both_environments_are_the_ranks(bench) -> None:
    cpu = min(os.sched_getaffinity(0))
    path = bench.script(
        """
        import ctypes, os, torch
        from pathlib import Path
        getenv = ctypes.CDLL(None).getenv; getenv.restype = ctypes.c_char_p
        print(torch.get_num_threads(), os.environ["MINE"], getenv(b"MINE"), os.sched_getaffinity(0))
        print(os.getsid(0) == os.getpgid(0) == os.getpid(), b"script.py" in Path("/proc/self/cmdline").read_bytes())
        """
    )
    bench.command("script", str(path), env={"MINE": "x", "OMP_NUM_THREADS": "2"}, cpus=(cpu,))
    assert bench.wait_exit().exit_code == 0, bench.err()
    assert bench.out() == f"2 x b'x' {{{cpu}}}\nTrue True\n"


def test_a_rank_has_the_users_limit_on_open_files(bench) -> None:
    bench.script("import resource; print(resource.getrlimit(resource.RLIMIT_NOFILE))", "limit.py")
    program = (sys.executable, str(bench.directory / "limit.py"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    bench.command("script", program[1], rank=0, open_files=700)
    bench.command("command", *program, rank=1, open_files=700)
    bench.wait_exit(2)
    assert [bench.out(rank) for rank in (0, 1)] == [f"(700, {hard})\n"] * 2


def test_outputs_are_appended_and_may_be_one_file(bench) -> None:
    log = bench.directory / "log"
    log.write_text("before\n")
    path = bench.script("import sys; print('out'); print('err', file=sys.stderr)")
    bench.command("script", str(path), stdout_path=str(log), stderr_path=str(log))
    bench.wait_exit()
    assert log.read_text() == "before\nout\nerr\n"


def test_ctrl_c_in_a_script_is_a_keyboard_interrupt(bench) -> None:
    exited = bench.run(
        """
        import os, signal
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt:
            print("interrupted")
        signal.signal(signal.SIGTERM, lambda *_: print("asked to stop"))
        os.kill(os.getpid(), signal.SIGTERM)
        """
    )
    assert exited.exit_code == 0
    assert bench.out() == "interrupted\nasked to stop\n"


def test_a_python_of_another_directory_finds_the_package(tmp_path: Path) -> None:
    """Neither the working directory nor PYTHONPATH is needed to find this package in a new interpreter."""
    from resilio_hpc.core import interpreter

    source = interpreter.source("launch.workers.forking.zygote").replace(
        "import main; main()", "import main; print(main.__module__, sys.path)"
    )
    bare = scrubbed()
    del bare["PYTHONPATH"]
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, env=bare, capture_output=True, text=True)
    assert done.stdout.startswith("resilio_hpc.launch.workers.forking.zygote ["), done.stderr
    assert "['', " not in done.stdout


def test_a_child_that_a_rank_forks_does_not_end_as_the_rank(bench) -> None:
    """Neither is its error the rank's, nor does it save the rank's last step."""
    error_file = bench.directory / "error.json"
    source = """
import os, sys, types
module = sys.modules["resilio_hpc.train.last_step"] = types.ModuleType("last_step")
module.save_before_end = lambda error: print("saved in", "child" if os.getppid() == rank else "rank")
rank = os.getpid()
for end in (lambda: 1 / 0, lambda: sys.exit(3)):
    if os.fork() == 0:
        end()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
sys.exit(4)
"""
    assert bench.run(source, env={"TORCHELASTIC_ERROR_FILE": str(error_file)}).exit_code == 4
    assert bench.out().split("\n") == ["1", "3", "saved in rank", ""]
    assert not error_file.exists()
    assert error_file.with_suffix(".ends").read_text().endswith(" 4")
