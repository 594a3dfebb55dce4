"""Run a script, and strike one of its ranks in the midst of a step, whatever framework makes the steps.

strike.py STEP RANK HOW SCRIPT [WORD…]     HOW: kill, raise, or wait (until the file "go on" is there)

It strikes in the first life of the ranks only, in the forward pass that follows after STEP optimizer steps.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import time
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook


def main() -> None:
    """Plant it, and run the script."""
    step, rank, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    done = 0

    def stepped(*_: Any) -> None:
        nonlocal done
        done += 1

    def strike(module: Any, _: Any) -> None:
        nonlocal step
        first_life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        if not module.training or done != step or os.environ.get("RANK", "0") != rank or not first_life:
            return
        step = -1
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise ValueError("planted")
        Path("struck").touch()
        while not Path("go on").exists():
            time.sleep(0.01)

    register_optimizer_step_post_hook(stepped)
    register_module_forward_pre_hook(strike)
    sys.argv = sys.argv[4:]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
