"""Standby ranks of a node: processes that wait, before the function that ranks enter again, for a lost one's place.

One has run the script up to its ``@train.restartable`` function, without a rank: what is imported, read and made there
is ready, such as a model's memory. It takes a place by the message that has the ranks which live enter the next round.

With ``--process-images on`` it waits as an image on the node's disk, from which the spawner restores it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import msgspec

from resilio_hpc.core import rank_link
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.output.error_file import describe_exit, read_error
from resilio_hpc.launch.workers.process_images import ImageDump, ProcessImages
from resilio_hpc.launch.workers.rank_env import standby_variables
from resilio_hpc.launch.workers.rank_owner import AnySpawner
from resilio_hpc.launch.workers.rank_reentry import may_follow

MOST_LOST = 3  # standby processes that ended by themselves, while they waited; then there are no more
_OF_THE_RANK = ("LOCAL_RANK", "RESILIO_LOCAL_RANK")


class Standby(msgspec.Struct):
    """One process. ``number``: its local rank for the spawner, below 0. ``pid`` 0: it is being started, or an image.

    ``may_be_ended``: with the ranks of a round, since it was not known yet when they were ended.
    """

    number: int
    command: sm.RankCommand
    began: float
    pid: int = 0
    is_ready: bool = False
    may_be_ended: bool = False
    dump: ImageDump | None = None
    image: sm.RankImage | None = None


class StandbyRanks:
    """Keeps so many processes ready as the option says, while the ranks of the node train."""

    def __init__(self, node: NodeContext, spawner: AnySpawner) -> None:
        self._node = node
        self._count = node.options.reentry.spare_ranks
        self._spawner = spawner
        self._numbers = itertools.count(-1, -1)
        self._waiting: dict[int, Standby] = {}
        self._taken: dict[int, int] = {}  # pid → local rank
        self._model: sm.RankCommand | None = None
        self._lost = 0
        self._images = ProcessImages(node)
        self._restored: dict[int, tuple[sm.RankCommand, sm.RankImage, float]] = {}  # by local rank, and since when

    def keep(self) -> tuple[int, ...]:
        """Return the processes that have no rank, which live on when the ranks are ended."""
        for one in self._waiting.values():
            one.may_be_ended = not one.pid
        return tuple(one.pid for one in self._waiting.values() if one.pid)

    def begin(self, commands: list[sm.RankCommand]) -> None:
        """Take the commands of a round's ranks. Where their arguments differ, no process can stand in for each."""
        same = len({(command.argv, command.kind) for command in commands}) == 1
        self._model = commands[0] if commands and same and not commands[0].stdin_path else None

    def tick(self, local: LocalRound | None) -> None:
        """Start what is missing, once all ranks here train in the function that can be entered again."""
        for one in list(self._waiting.values()):
            if one.dump is not None and one.dump.is_over():
                self._on_dumped(one, one.dump)
        model = self._model
        if model is None or local is None or local.failed or local.terminating or local.finishing:
            return
        missing = self._count - len(self._waiting)
        if missing <= 0 or not all(rank.can_reenter and rank.first_step_at for rank in local.ranks.values()):
            return
        for _ in range(missing):
            number = next(self._numbers)
            command = _without_rank(model, number, self._node.arena_dir)
            self._waiting[number] = Standby(number, command, time.monotonic())
            self._spawner.spawn(command)

    def heard(self, number: int, message: rank_link.RankMessage) -> None:
        """Take a message of a process that has no rank."""
        one = self._waiting.get(number)
        if one is not None and isinstance(message, rank_link.CanReenter) and not one.is_ready:
            one.is_ready = True
            self._node.record("standby_ready", pid=one.pid, seconds=round(time.monotonic() - one.began, 3))
            one.dump = self._images.begin(one.command, one.pid)

    def _on_dumped(self, one: Standby, dump: ImageDump) -> None:
        one.dump = None
        if dump.failed:
            self._images.give_up("dumped", one.pid, dump.failed)
            self._images.remove(dump.image)
            if not one.pid:
                del self._waiting[one.number]
        else:
            one.pid, one.image = 0, dump.image
            self._images.made(dump)

    def with_image(self, command: sm.RankCommand) -> sm.RankCommand:
        """Return a rank's command, with the image of a process that can take its place, if there is one."""
        for number, one in list(self._waiting.items()):
            if one.image is not None and may_follow(one.command, command, _OF_THE_RANK):
                del self._waiting[number]
                self._restored[command.local_rank] = command, one.image, time.monotonic()
                return msgspec.structs.replace(command, image=one.image)
        return command

    def take(self, command: sm.RankCommand) -> int:
        """Return the process that takes this rank, which has to hear so; 0: there is none."""
        for number, one in list(self._waiting.items()):
            if one.is_ready and one.pid and one.dump is None and may_follow(one.command, command, _OF_THE_RANK):
                del self._waiting[number]
                self._taken[one.pid] = command.local_rank
                _move(one.pid, command.cpus)
                self._node.record("standby_used", pid=one.pid, rank=int(command.env.get("RANK", -1)))
                return one.pid
        return 0

    def take_event(self, event: sm.SpawnerEvent) -> sm.RankEvent | None:
        """Return an event of the spawner for the ranks; None where it is of a process without one."""
        if isinstance(event, sm.SpawnerDied):
            self._end_all()  # and all processes with it
            self._taken.clear()
            self._restored.clear()
        if isinstance(event, sm.ImageFailed):
            self._images.give_up("restored", event.pid, event.reason)
            self._drop_images()
            return None
        if isinstance(event, sm.Started) and (found := self._restored.pop(event.local_rank, None)) is not None:
            self._on_restored(event, *found)
        if not isinstance(event, sm.Started | sm.Exited | sm.SpawnFailed) or event.local_rank >= 0:
            return event
        if isinstance(event, sm.Exited) and (local_rank := self._taken.pop(event.pid, None)) is not None:
            return msgspec.structs.replace(event, local_rank=local_rank)
        one = self._waiting.get(event.local_rank)
        if one is None:
            return None  # the run ends, and all processes with it
        if isinstance(event, sm.Started):
            one.pid = event.pid
        else:
            one.pid = 0
            if one.dump is not None or one.image is not None:
                return None  # CRIU ended it, or will tell why not
            del self._waiting[event.local_rank]
            if isinstance(event, sm.SpawnFailed) or not one.may_be_ended:
                self._on_lost(one, event)
        return None

    def _drop_images(self) -> None:
        for number, one in list(self._waiting.items()):
            if one.image is not None:
                del self._waiting[number]
                self._images.remove(one.image)

    def _on_restored(self, event: sm.Started, command: sm.RankCommand, image: sm.RankImage, began: float) -> None:
        self._images.remove(image)
        if event.mode == "image":
            _move(event.pid, command.cpus)
            seconds, rank = round(time.monotonic() - began, 3), int(command.env.get("RANK", -1))
            self._node.record("standby_used", pid=event.pid, rank=rank, restored_s=seconds)

    def _on_lost(self, one: Standby, event: sm.Exited | sm.SpawnFailed) -> None:
        """Say why a process has ended. Where it never waited, or too many have ended, there are no more."""
        self._lost += 1
        for_good = not one.is_ready or self._lost >= MOST_LOST
        if isinstance(event, sm.SpawnFailed):
            why = event.error
        else:
            said, _ = read_error(Path(one.command.env["TORCHELASTIC_ERROR_FILE"]))
            why = said.message if said is not None else describe_exit(event.exit_code, event.signal)
        if for_good:
            self._count = 0
        fields = {"reason": why[:500], "was_ready": one.is_ready, "for_good": for_good, "log": one.command.stderr_path}
        (self._node.tell if for_good else self._node.record)("standby_lost", **fields)

    def end(self) -> None:
        """End all that wait; no more are started."""
        self._count = 0
        self._end_all()

    def _end_all(self) -> None:
        for one in self._waiting.values():
            if one.dump is not None:
                one.dump.end()
            elif one.pid:
                process_tree.send([*process_tree.descendants(one.pid), one.pid], signal.SIGKILL)
        self._waiting.clear()


def _without_rank(command: sm.RankCommand, number: int, directory: Path) -> sm.RankCommand:
    """Return the command of a process without a rank, after that of one of the round's ranks."""
    name = f"standby{-number}"
    out, err = (Path(path) for path in (command.stdout_path, command.stderr_path))
    return msgspec.structs.replace(
        command, local_rank=number, env=command.env | standby_variables(command.env, number, directory),
        stdout_path=str(out.with_name(f"{name}.log")),
        stderr_path=str(err.with_name(f"{name}.err.log" if err != out else f"{name}.log")),
    )  # fmt: skip


def _move(pid: int, cpus: tuple[int, ...] | None) -> None:
    """Bind all threads of a process to the rank's CPUs."""
    if not cpus:
        return
    with contextlib.suppress(OSError):  # it ends: that is found by its exit
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), cpus)
