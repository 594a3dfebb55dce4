"""Ranks of a torch.distributed group as forked processes of a test: what each of them says comes back."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.core.gloo_groups import keep_alive


def in_ranks(
    act: Callable[[int], Any], room: Path, ranks: int = 2, environment: Mapping[str, str] | None = None
) -> list[Any]:
    """What ``act(rank)`` returns in each rank, through JSON; the text of a ResilioError that it raises.

    ``act`` may find a gloo group by ``join``. ``room``: a directory. ``environment``: variables to set.
    """
    pids = [_fork(lambda rank=rank: act(rank), room / f"said-{rank}", environment or {}) for rank in range(ranks)]
    for pid in pids:
        os.waitpid(pid, 0)
    said = [json.loads((room / f"said-{rank}").read_text()) for rank in range(ranks)]
    failed = [text for text in said if isinstance(text, str) and text.startswith("Traceback")]
    assert not failed, failed[0]
    return said


def join(room: Path, rank: int, ranks: int) -> None:
    """Rank and size as arguments, as torch's tutorials give them; no variable says them."""
    keep_alive()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{room}/store", rank=rank, world_size=ranks)


def _fork(act: Callable[[], Any], said: Path, environment: Mapping[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        os.environ.update(environment)
        try:
            answer = act()
        except ResilioError as error:
            answer = f"{type(error).__name__}: {error}"
        said.write_text(json.dumps(answer))
    except BaseException:  # noqa: BLE001 - the test shows it
        said.write_text(json.dumps(traceback.format_exc()))
    finally:
        os._exit(0)
