"""Exports that are ended while they read: each in a process of its own, forked after one import of torch, for speed.

python ended_exports.py CHECKPOINTS [NAME SIGNAL]…      prints a line of JSON for each export
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from pathlib import Path

import torch.distributed.checkpoint  # noqa: F401  which every export into a DCP folder would import

from resilio_hpc.ckpt.convert import whole_state
from resilio_hpc.cli.main import main


def hang(*_: object) -> None:
    print("reading", flush=True)
    while True:
        signal.pause()


def export(checkpoints: Path, target: Path, write: int) -> int:
    """The process that exports, and says so at ``write`` once it reads."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.dup2(write, 1)
        whole_state.WholeState._read = hang  # type: ignore[method-assign, assignment]
        code = main(["ckpt", "export", str(checkpoints), str(target)])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001  a forked child tells, and never goes on as its parent
        traceback.print_exc()
    finally:
        os._exit(code)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def ended(checkpoints: Path, name: str, number: int) -> dict[str, object]:
    read, write = os.pipe()
    pid = export(checkpoints, checkpoints.parent / name, write)
    os.close(write)
    with open(read) as said:
        line = said.readline()
        before = names(checkpoints.parent)
        os.kill(pid, number)
        _, status = os.waitpid(pid, 0)
    return {"said": line, "before": before, "code": os.waitstatus_to_exitcode(status),
            "after": names(checkpoints.parent)}  # fmt: skip


if __name__ == "__main__":
    of = Path(sys.argv[1])
    for target, number in zip(sys.argv[2::2], sys.argv[3::2], strict=True):
        print(json.dumps(ended(of, target, int(number))), flush=True)
    os._exit(0)  # taking torch apart takes seconds
