"""Run programs one after the other, each in a process forked after one import of torch: quick.

python forked_programs.py '[["DIRECTORY", "SOURCE"], …]'      prints JSON: [[exit code, what it printed], …]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch._dynamo  # noqa: F401  which the first optimizer of every program would import


def begin(directory: str, output: int) -> None:
    """In the child: the program's own directory and output."""
    os.chdir(directory)
    for number in (1, 2):
        os.dup2(output, number)


def main() -> None:
    ended: list[tuple[int, str]] = []
    for directory, source in json.loads(sys.argv[1]):
        with tempfile.TemporaryFile() as output:
            pid = os.fork()
            if pid == 0:
                begin(directory, output.fileno())
                sys.argv = ["-c"]
                exec(compile(source, "program", "exec"), {"__name__": "__main__"})
                return  # it ends as any interpreter does
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            output.seek(0)
            ended.append((code, output.read().decode()))
    print(json.dumps(ended))


if __name__ == "__main__":
    main()
