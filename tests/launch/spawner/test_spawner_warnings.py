"""Slurm may give the warning of ``sbatch --signal`` to every process of a step, not to the agent alone."""

from __future__ import annotations

import os
import signal


def test_a_warning_does_not_kill_the_spawner_and_ranks_have_the_default_as_a_plain_process(either) -> None:
    either.spawn(
        """
        import os, signal, subprocess, sys
        number = signal.SIGUSR1
        print(signal.getsignal(number) is signal.SIG_DFL, signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL)
        child = subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 10); print('alive')"])
        print(child.returncode, flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), signal.SIGUSR2)
        """
    )
    assert either.wait_exit().signal == signal.SIGUSR2
    assert either.out() == "True True\n-10\n"
    for warning in (signal.SIGUSR1, signal.SIGUSR2):
        os.kill(either.spawner.pid, warning)
    either.spawn("print('and goes on')", rank=1)
    assert either.wait_exit(2).exit_code == 0
