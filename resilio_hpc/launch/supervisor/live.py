"""``resilio-launch --view``: the live view has the terminal, all other output goes to ``console.log``.

The view is a child process that reads the run directory only (``resilio view``). The supervisor keeps its main thread
and its signals, and a crash of the view does no harm. While the view runs, the launch's standard output and error are
the file, so output of agents, srun and the supervisor cannot disturb it; ranks' output goes to their own logs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from resilio_hpc.core import trusted_files

FAREWELL_S = 10.0  # time for the view to show the verdict and end


def with_view(run_path: Path, run_to_verdict: Callable[[], int]) -> int:
    """Run a launch under a live view. Return its exit code, with standard output and error as before."""
    sys.stdout.flush()
    sys.stderr.flush()
    output, error = os.dup(1), os.dup(2)
    log = trusted_files.open_file(run_path / "console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.set_blocking(log, True)
    patience_s = 0.0
    view = _start(run_path, output if os.isatty(output) or not os.isatty(error) else error)
    try:
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        code = run_to_verdict()
        patience_s = FAREWELL_S
        return code
    finally:
        _end(view, patience_s)
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(output, 1)
        os.dup2(error, 2)
        for descriptor in (log, output, error):
            os.close(descriptor)


def _start(run_path: Path, terminal: int) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "resilio_hpc.cli.main", "view", str(run_path)]
    argv += ["--launcher", str(os.getpid()), "--since", f"{time.time():.3f}"]
    # a session of its own: Ctrl-C goes to the supervisor, and the view shows its effect
    return subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=terminal, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _end(view: subprocess.Popen[bytes], patience_s: float) -> None:
    for ask in (None, view.terminate, view.kill):
        if ask is not None:
            ask()
            patience_s = 2.0
        try:
            view.wait(patience_s)
            return
        except subprocess.TimeoutExpired:
            continue
