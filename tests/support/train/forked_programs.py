"""Run programs one after the other, each in a process forked after one import of torch: quick.

python forked_programs.py '[["DIRECTORY", "SOURCE"], …]'      prints JSON: [[exit code, what it printed], …]
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
import tempfile
import threading
import traceback
from typing import NoReturn

import torch._dynamo  # noqa: F401  which the first optimizer of every program would import


def run(directory: str, source: str, output: int) -> NoReturn:
    """In the child. It ends as an interpreter does, but for taking all of torch apart, which takes seconds."""
    code = 1
    try:
        os.chdir(directory)
        for number in (1, 2):
            os.dup2(output, number)
        sys.argv = ["-c"]
        exec(compile(source, "program", "exec"), {"__name__": "__main__"})
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        if sys.exc_info()[0] not in (None, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)


def main() -> NoReturn:
    gc.freeze()  # children need not look at it again
    ended: list[tuple[int, str]] = []
    for directory, source in json.loads(sys.argv[1]):
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                run(directory, source, output.fileno())
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            ended.append((code, output.read().decode()))
    print(json.dumps(ended), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
