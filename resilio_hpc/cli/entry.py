"""The entry points of the installed commands.

Until a command's own code is loaded, Ctrl-C ends it without a traceback.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:  # not where a shell lets this process ignore it
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def resilio() -> int:
    """Run the command ``resilio``."""
    return _run("resilio_hpc.cli.main")


def resilio_launch() -> int:
    """Run the command ``resilio-launch``."""
    return _run("resilio_hpc.cli.resilio_launch")


def _run(module: str) -> int:
    import importlib

    os.environ.pop("PYTHONINSPECT", None)  # a prompt after a launch, or after a rank, would hide how it ended
    main = importlib.import_module(module).main
    signal.signal(signal.SIGINT, _INTERRUPT)
    gc.freeze()  # what was imported stays: the end would look through it for garbage
    code: int = main()
    if _INTERRUPT is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # all output is done: only the interpreter has to end
    if sys.flags.inspect:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)
    return code
