"""The agent's end of the process that serves this node's own disk to other nodes (``ckpt.tiers.disk_server``).

Also what the agent tells its ranks of other nodes' disks (``ckpt.tiers.peer_disks``).
"""

from __future__ import annotations

import hashlib
import hmac
import socket
import subprocess
from collections.abc import Mapping

from resilio_hpc.ckpt.tiers.disk_messages import ServeDisk
from resilio_hpc.ckpt.tiers.peer_disks import write_known
from resilio_hpc.core.json_lines import encode_line
from resilio_hpc.launch.process import bootstrap
from resilio_hpc.launch.protocol import messages as m
from resilio_hpc.launch.workers.node_context import NodeContext

MAX_DEATHS = 5
_BACKLOG = 1024
_END_S = 2.0


class DiskLink:
    """Serves the disk of ``--local-checkpoints``; without that option it does nothing.

    The agent holds the socket, so its port stays when the process dies, and callers wait for the next process.
    """

    def __init__(self, node: NodeContext) -> None:
        self.port = 0
        """Where others may read; 0: nowhere."""
        self.known = node.local_dir / "peer-disks"
        self._node = node
        self._key = hmac.digest(node.run.secret.strip(), b"resilio local checkpoints", hashlib.sha256)
        self._listener: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._deaths = 0
        if node.options.checkpoints.local_checkpoints:
            self._listener = socket.create_server((node.settings.address, 0), backlog=_BACKLOG)
            self.port = self._listener.getsockname()[1]

    def start(self) -> None:
        """Start the process."""
        node, listener = self._node, self._listener
        if listener is None:
            return
        with (node.local_dir / "disk-giver.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*bootstrap.command("ckpt.tiers.disk_server"), str(listener.fileno())], pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True,
            )  # fmt: skip
        assert self._process.stdin
        serve = ServeDisk(self._key, node.options.checkpoints.local_checkpoints, str(node.run.path / "checkpoints"))
        try:
            self._process.stdin.write(encode_line(serve))
            self._process.stdin.flush()
        except OSError:
            pass  # the process is dead: ``tick`` finds that

    def tick(self) -> None:
        """Start the process again if it died."""
        if self._process is None or self._process.poll() is None:
            return
        self._deaths += 1
        self._end()
        self._node.record("disk_giver_died")
        if self._deaths <= MAX_DEATHS:
            self.start()
        else:
            log = self._node.local_dir / "disk-giver.log"
            self._node.say(
                f"{self._node.name}: other nodes cannot read checkpoints from its disk any more: the process "
                f"that gives them died {self._deaths} times; they read the shared file system instead; see {log}"
            )
            self._close_listener()  # callers get an error at once

    def begin(self, start: m.Start) -> None:
        """Give the process the ranks of a round."""
        write_known(self.known, self._key, self.of_others(start), self._node.name)

    def of_others(self, start: m.Start) -> Mapping[str, str]:
        """Return the endpoint of each other node of the round that serves its disk, by node."""
        if self._listener is None:
            return {}
        given = zip(start.state.members, start.disk_ports, strict=False)
        mine = self._node.name
        return {member.node: f"{member.address}:{port}" for member, port in given if port and member.node != mine}

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin
            process.kill()
            process.stdin.close()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                pass  # it cannot be killed while its disk hangs

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def close(self) -> None:
        """End the process."""
        self._end()
        self._close_listener()
