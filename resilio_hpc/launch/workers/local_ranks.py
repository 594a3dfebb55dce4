"""The agent's ranks: spawner, link, logs, console, error files."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from resilio_hpc.core import rank_link
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.rank_error import without_controls
from resilio_hpc.launch.config import slurm_variables
from resilio_hpc.launch.process import process_tree
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.forking import spawner_messages as sm
from resilio_hpc.launch.workers.local_round import LocalRound
from resilio_hpc.launch.workers.lone_restarts import LoneRestarts
from resilio_hpc.launch.workers.node_context import NodeContext
from resilio_hpc.launch.workers.output.console import Console
from resilio_hpc.launch.workers.output.error_file import read_error
from resilio_hpc.launch.workers.output.log_tail import last_line
from resilio_hpc.launch.workers.output.oom_kills import OomKills
from resilio_hpc.launch.workers.rank_accounts import RankAccounts
from resilio_hpc.launch.workers.rank_commands import RankCommands
from resilio_hpc.launch.workers.rank_env import RankPlacement, rank_environment
from resilio_hpc.launch.workers.rank_evidence import NO_EVIDENCE, RankEvidence, last_lines, telling_line
from resilio_hpc.launch.workers.rank_files import RankFiles
from resilio_hpc.launch.workers.rank_look import RankLook
from resilio_hpc.launch.workers.rank_owner import AnySpawner, RankEvents, StopHow, Surroundings
from resilio_hpc.launch.workers.rank_reentry import RankReentry
from resilio_hpc.launch.workers.rank_server import RankServer
from resilio_hpc.launch.workers.slow_ends import SlowEnds
from resilio_hpc.launch.workers.spawner import Spawner
from resilio_hpc.launch.workers.standby_ranks import StandbyRanks

MAX_SPAWNER_RESTARTS = 5
SHOWS_S = 0.02  # of each turn of the agent's loop, at most, for the ranks' output


class LocalRanks:
    """Carries out the decisions of the core about this node's ranks, and reports what happens to them."""

    imports_first = True  # the spawner imports before ranks are forked

    def __init__(
        self, node: NodeContext, core: RankEvents, around: Surroundings, begun: Path, token: str, spool: Path
    ) -> None:
        """Take the node's parts.

        ``begun``: the file with the step that is being read ahead. ``token`` marks the node's ranks in ``/proc``.
        """
        self._node, self._core, self._around = node, core, around
        options = self._options = node.options
        watched = options.hangs.watched(options.torch, bool(options.mpi), options.kind, options.script)
        environment = rank_environment(slurm_variables.of_ranks(os.environ), core.slots, token, watched)
        self._spawner = self._new_spawner(environment, node.local_dir)
        logs = Path(options.output.log_dir) if options.output.log_dir else spool / "logs"
        self._files = RankFiles(logs, node.local_dir / "errors")
        self._console = Console(self._options)
        self.server = RankServer(node.local_dir / "agent.sock", self._heard)
        self._commands = RankCommands(node, around, environment, self.server.path, begun)
        self._pids: dict[int, int] = {}
        self._standby = StandbyRanks(node, self._spawner)
        self._reentry = RankReentry(self.server, self._pids, standby=self._standby.take)
        self._slow_ends = SlowEnds(node, core, self._pids, self._files.errors)
        self._alone = LoneRestarts()
        self._look = RankLook(node.arena_dir, self._pids)
        self._oom_kills = OomKills()
        self._accounts = RankAccounts(node.arena_dir, self._pids)
        self._starting: set[int] = set()
        self._start_began, self._round = 0.0, -1
        self._spawner_restarts, self._fork_refused = 0, ""

    def _new_spawner(self, environment: dict[str, str], directory: Path) -> AnySpawner:
        zygote = self._options.zygote and self._options.kind != "command"
        options = self._options
        return Spawner(
            environment, options.preload, zygote, directory, cwd=self._node.settings.cwd, torch=options.torch,
            program=(options.kind, options.script), lost_s=options.heartbeat_timeout_s,
        )  # fmt: skip

    def start(self) -> None:
        """Start the spawner; it imports torch while the agents find each other."""
        self._core.ready = not self.imports_first
        self._spawner.start()

    def filenos(self) -> Iterator[int]:
        """Return the descriptors to poll."""
        yield from self._spawner.filenos()
        yield from self.server.filenos()

    def serve(self, ready: set[int]) -> None:
        """Serve readable descriptors; a rank's messages are taken before its end."""
        for descriptor in [fd for fd in self.server.filenos() if fd in ready]:
            self.server.serve(descriptor)
        if not ready.isdisjoint(self._spawner.filenos()):
            self._take_events()

    def _take_events(self) -> None:
        for event in self._spawner.events():
            if (mine := self._standby.take_event(event)) is not None:
                self._on_event(mine)

    def tick(self) -> None:
        """Show the ranks' output, and report ranks that do not end."""
        self._console.follow(SHOWS_S)
        local = self._core.local
        self._standby.tick(local)
        self._slow_ends.tick(local)
        if local is not None and (seen := self._look.answer(local)) is not None:
            self._core.ranks_seen(*seen)
        if local is not None and (passed := self._accounts.tick(local)) is not None:
            self._core.times.passed(local.number, *passed)

    # -- what the core wants -----------------------------------------------------------------------------------

    @property
    def pids(self) -> Mapping[int, int]:
        """Return the ranks' processes, by local rank."""
        return self._pids

    def open_store(self, round_number: int) -> None:
        """Open a round's rendezvous store on this node."""
        self._spawner.open_store(round_number, self._node.settings.address)

    def stop(self, how: StopHow, keep_stores_from: int) -> None:
        """End all ranks and all their descendants."""
        number, heeded = signal.SIGTERM if how.grace_s > 0 else signal.SIGKILL, not how.for_good
        if how.for_good:
            self._standby.end()
        keep = self._reentry.keep(how.keep) + self._standby.keep()
        self._spawner.stop(number, how.grace_s, keep_stores_from, heeded_only=heeded, spare=how.well, keep=keep)

    def terminate(self) -> None:
        """Send SIGTERM to every rank; none is killed."""
        for pid in self._pids.values():
            process_tree.signal_group(pid, signal.SIGTERM)

    def look(self, message: m.LookAtRanks) -> None:
        """Look at the ranks from outside → ``ranks_seen``."""
        ranks = self._core.local.ranks if self._core.local is not None else {}
        sampled = [number for number, rank in ranks.items() if rank.rank in message.sampled]
        self._look.ask(message.look, message.stacks, sampled)

    def calls(self) -> int:
        """Return how many calls of communication libraries were begun and completed here, or -1."""
        return self._look.calls(self._core.local)

    def spawn(self, local: LocalRound, start: m.Start) -> None:
        """Start the local ranks of a round."""
        self._round, self._start_began, self._starting = local.number, time.monotonic(), set(local.ranks)
        logs = (files := self._files).begin(local, self._commands.log_paths)
        world, nodes = sum(member.local_world_size for member in start.state.members), len(start.state.members)
        commands = []
        for rank, log in zip(local.ranks.values(), logs, strict=True):
            here = local.member
            placement = RankPlacement(here.node_rank, nodes, rank.local_rank, len(here.ranks), rank.rank, world)
            try:
                command = self._commands.of(placement, start, log.stdout, log.stderr, files.errors[rank.local_rank])
            except UsageError as error:  # this world is impossible: every node reports it, and each try counts
                self._core.spawn_failed(rank.local_rank, str(error), time.time())
                return
            commands.append(command)
            if self._reentry.enter(command):
                self._starting.discard(rank.local_rank)
                rank.is_kept = True
            else:
                self._spawner.spawn(self._standby.with_image(command))
        self._reentry.end_others()
        self._alone.begin(commands)
        self._standby.begin(commands)
        self._look.begin(local.number, files.stacks, files.kept)
        self._console.watch(logs, world, files.directory)
        if not self._starting:
            self._all_started("in-process")

    def restart(self, local: LocalRound, local_rank: int) -> None:
        """Start one rank of the round again; the others go on."""
        self._files.drop_error(local_rank)
        self._look.forget(local_rank)
        self._spawner.spawn(self._alone.again(local_rank, local.ranks[local_rank].restarts))

    def judge(self, cause: m.Cause | None) -> None:
        """Take what ended the last round, for the console."""
        self._console.judge(cause)

    def _heard(self, round_number: int, local_rank: int, message: rank_link.RankMessage) -> None:
        if local_rank < 0:
            self._standby.heard(local_rank, message)
        elif not isinstance(message, rank_link.Raised):
            self._core.rank_said(round_number, local_rank, message)
        elif (local := self._core.local) is not None and local.number == round_number:
            error = without_controls(message.message), without_controls(message.traceback)
            self._around.rank_failed(local_rank, error, self._files.error_logs.get(local_rank))
            self._core.ends.raised(local, local_rank, message.time, error, self._evidence(local_rank, True))

    # -- what becomes of them ----------------------------------------------------------------------------------

    def _on_event(self, event: sm.RankEvent) -> None:
        node = self._node
        if isinstance(event, sm.Ready):
            self._core.ready = True
            node.record("spawner_ready", seconds=round(event.seconds, 3), why_not_fork=event.why_not_fork)
            self._fork_refused = event.why_not_fork
            if event.why_not_fork and self._options.zygote and self._options.kind != "command":
                node.say(f"ranks on {node.name} are executed, not forked: {event.why_not_fork}")
        elif isinstance(event, sm.Started):
            self._on_started(event)
        elif isinstance(event, sm.SpawnFailed):
            self._core.spawn_failed(event.local_rank, event.error, time.time())
        elif isinstance(event, sm.Exited):
            self._on_exited(event)
        elif isinstance(event, sm.StoreReady):
            self._core.store_ready(event.round, event.port)
        elif isinstance(event, sm.StoreDied):
            node.record("store_died", round=event.round, error=event.error)
            self._core.store_died(event.round, event.error, time.time())
        elif isinstance(event, sm.AllStopped):
            self._reentry.others_ended()
            node.record("ranks_stopped", seconds=round(event.seconds, 4))
            self._core.all_stopped()
        elif isinstance(event, sm.StopFailed):
            node.say(f"{node.name}: processes {event.pids} outlived SIGKILL (stuck in the kernel?)")
            node.record("stop_failed", pids=list(event.pids))
        else:
            self._on_spawner_died(event)

    def _on_started(self, event: sm.Started) -> None:
        self._pids[event.local_rank] = event.pid
        self._starting.discard(event.local_rank)
        self._reentry.started(event, self._core.local)
        if event.mode == "exec" and event.why and event.why != self._fork_refused:
            self._fork_refused = event.why
            if self._options.zygote and self._options.kind != "command":
                self._node.say(f"ranks on {self._node.name} are executed, not forked: {event.why}")
        if self._alone.started(event.local_rank):
            self._core.ends.restarted(self._core.local, event.local_rank, event.time)
        elif not self._starting:
            self._all_started(event.mode)

    def _all_started(self, mode: str) -> None:
        local = self._core.local
        pids = {local.ranks[number].rank: pid for number, pid in self._pids.items()} if local else {}
        self._node.record("ranks", round=self._round, mode=mode, pids=pids, kept=local.kept if local else 0)
        self._core.ranks_started(self._round, round(time.monotonic() - self._start_began, 4), mode)

    def _on_exited(self, event: sm.Exited) -> None:
        if self._reentry.was_ended(event.pid):
            return
        self.server.drain(event.local_rank)
        error, at = (self._end_in_words(event), ""), event.time
        self._alone.ended(event.local_rank, event.pid)
        if event.exit_code != 0 and event.local_rank in self._files.errors:
            said, note = read_error(self._files.errors[event.local_rank])
            if note:
                self._node.record("error_file_ignored", reason=note)
            if said is not None:
                error, at = (said.message, said.traceback), min(at, said.time)
        failed = event.exit_code != 0 and self._core.local is not None  # a restart waits for no look at others
        evidence = self._evidence(event.local_rank, bool(error[1])) if failed or error[1] else NO_EVIDENCE
        local_rank, how = event.local_rank, (event.exit_code, event.signal)
        self._look.ended(local_rank, self._pids.pop(local_rank, 0))
        if failed:
            self._around.rank_failed(local_rank, error, self._files.error_logs.get(local_rank))
        self._slow_ends.tell_of_origin(error[0])
        self._core.ends.exited(self._core.local, local_rank, how, at, error, evidence)

    def _evidence(self, local_rank: int, raised: bool) -> RankEvidence:
        log = None if self._options.output.log_dir else self._files.error_logs.get(local_rank)  # the user's may hang
        told = telling_line(last_lines(log)) if log is not None and not raised else ""
        return RankEvidence(told, self._look.entered(local_rank))

    def _end_in_words(self, event: sm.Exited) -> str:
        return self._oom_kills.end_in_words(event.exit_code, event.signal)

    def _on_spawner_died(self, event: sm.SpawnerDied) -> None:
        node, ending = self._node, self._core.ending
        node.record("spawner_died", exit_code=event.exit_code, signal=event.signal, swept=len(event.swept))
        self._spawner_restarts += 1
        self._pids.clear()
        if ending is None and self._spawner_restarts <= MAX_SPAWNER_RESTARTS:
            self.start()
        elif ending is None:
            log = node.local_dir / "spawner.log"
            node.say(f"the process that starts ranks died {self._spawner_restarts} times: {last_line(log)}")
            self._core.give_up("spawner keeps dying")
        self._core.spawner_died(event.time)

    def close(self) -> None:
        """Show the rest of the output, and end the spawner."""
        self._console.close(2.0)
        self.server.close()
        self._look.close()
        self._accounts.close()
        if (ending := self._core.ending) is None or ending.verdict != "completed":
            self._spawner.kill()
        elif left := self._spawner.release():
            self._node.tell("left_running", pids=left)
