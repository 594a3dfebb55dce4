"""The rack: one process that holds a whole dev cluster. Start with ``python -m resilio_hpc.devtools.devcluster.rack``.

It is PID 1 of a PID namespace in which all machines live, with its own mount and network namespace (whose bridge is
the cluster's switch). So nothing of a cluster has a name on the host: when the rack dies, for whatever reason, the
kernel ends every process, unmounts every mount and removes every interface. Only the state directory is left.

Until ``up`` says *keep* over the leash (a socket), the rack dies when that socket closes: killing ``up`` kills all.
Commands come over a Unix socket in the state directory, one JSON line each (messages.py).
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.devtools.devcluster import namespaces, node
from resilio_hpc.devtools.devcluster.messages import MachineState, Reply, Request
from resilio_hpc.devtools.devcluster.spec import ClusterPaths, ClusterSpec

_SWITCH = "switch"
_OTHER_SWITCH = "switch2"  # machines that are split from the others still reach each other there


@dataclass
class _Machine:
    name: str
    pid: int = 0
    pid_namespace: int = 0
    report: int = -1
    state: str = "off"
    detail: str = ""
    boots: int = 0
    link_up: bool = True


class Rack:
    """Machines, their power and their network cables."""

    def __init__(self, spec: ClusterSpec, layout: ClusterPaths, leash: socket.socket) -> None:
        self.spec = spec
        self.layout = layout
        self.leash = leash
        self.machines = {name: _Machine(name) for name in spec.machines}
        self.selector = selectors.DefaultSelector()
        self.listener = _listen(layout)
        self.children, self.child_signal = socket.socketpair()
        self.child_signal.setblocking(False)

    def serve(self) -> None:
        """Power everything on, then carry out requests until told to stop."""
        signal.set_wakeup_fd(self.child_signal.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)  # the pid 1 of a namespace is stopped on purpose only
        add = "".join(f"link add {switch} type bridge\n" for switch in (_SWITCH, _OTHER_SWITCH))
        subprocess.run(["ip", "-batch", "-"], input=add, check=True, text=True, timeout=10)
        for switch in (_SWITCH, _OTHER_SWITCH):
            namespaces.set_link(switch, True)
        for name in self.machines:
            self.boot(name)
        self.selector.register(self.leash, selectors.EVENT_READ, self._on_leash)
        self.selector.register(self.listener, selectors.EVENT_READ, self._on_request)
        self.selector.register(self.children, selectors.EVENT_READ, self._on_child)
        self.leash.sendall(b"started\n")
        while True:
            for key, _ in self.selector.select():
                key.data()

    def boot(self, name: str) -> None:
        """Power a machine on; its state becomes ``booting``, then ``up`` or ``failed``."""
        machine = self.machines[name]
        if machine.pid:
            raise ResilioError(f"{name} is already powered on")
        machine.report, report = os.pipe()
        pid = self._fork_machine(name, machine.boots > 0, report)
        os.close(report)
        if not pid:
            why = os.read(machine.report, 4096).decode(errors="replace").strip()
            os.close(machine.report)
            machine.report = -1
            raise ResilioError(f"{name} cannot be powered on: {why}")
        machine.pid = pid
        machine.pid_namespace = Path(f"/proc/{machine.pid}/ns/pid").stat().st_ino
        machine.state, machine.detail, machine.link_up = "booting", "", True
        machine.boots += 1
        self.selector.register(machine.report, selectors.EVENT_READ, lambda: self._on_report(machine))

    def _fork_machine(self, name: str, reboot: bool, report: int) -> int:
        """Fork a helper that enters a new PID namespace, forks the machine's init there, wires it and exits.

        Return the init's pid (it becomes a child of the rack when the helper exits), or 0 with the reason in
        ``report``.
        """
        pid_reader, pid_writer = os.pipe()
        helper = os.fork()
        if helper == 0:
            try:
                self._be_helper(name, reboot, report, pid_writer)
            except Exception as error:  # noqa: BLE001  the message is all that leaves this process
                os.write(report, f"failed: {error}\n".encode())
            finally:
                os._exit(1)
        os.close(pid_writer)
        with os.fdopen(pid_reader) as reader:
            text = reader.read()
        os.waitpid(helper, 0)
        return int(text or 0)

    def _be_helper(self, name: str, reboot: bool, report: int, pid_writer: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for handle in (self.leash, self.listener, self.children, self.child_signal):
            handle.close()
        namespaces.unshare(namespaces.NEW_PID)
        ready_reader, ready_writer = os.pipe()
        wired_reader, wired_writer = os.pipe()
        init = os.fork()
        if init == 0:
            os.close(wired_writer)
            os.close(pid_writer)
            if self.spec.private_tmp:
                namespaces.stay_on_one_cpu(self.spec.machines.index(name))
            own = namespaces.NEW_MOUNT | namespaces.NEW_UTS | namespaces.NEW_IPC | namespaces.NEW_NETWORK
            namespaces.unshare(own)
            os.write(ready_writer, b"r")
            node.run_init(self.spec, self.layout, name, reboot, wired_reader, report)
        os.close(ready_writer)
        os.read(ready_reader, 1)
        far_end = f"/proc/{init}/ns/net"  # a path: this helper's children count pids as the new machine does
        # as of a real card: with another one after a reboot, the others send to the old one for up to half a minute
        card = "02:00:" + socket.inet_aton(self.spec.address(name)).hex(":")
        add = f"link add {_port(name)} type veth peer name eth0 address {card} netns {far_end}"
        batch = f"{add}\nlink set {_port(name)} master {_SWITCH} up\n"
        done = subprocess.run(["ip", "-batch", "-"], input=batch, capture_output=True, text=True, timeout=10)
        if done.returncode != 0:
            os.write(report, f"failed: no network cable: {done.stderr.strip()}\n".encode())
        else:
            os.write(wired_writer, b"w")
        os.write(pid_writer, str(init).encode())
        os._exit(0)

    def crash(self, name: str) -> None:
        """Power a machine off at once: first the cable, so that no connection is closed, then every process."""
        machine = self.machines[name]
        if not machine.pid:
            raise ResilioError(f"{name} is already powered off")
        namespaces.set_link(_port(name), False)
        os.kill(machine.pid, signal.SIGKILL)
        os.waitpid(machine.pid, 0)  # returns when the machine's last process is gone
        self._powered_off(machine, "powered off")

    def _powered_off(self, machine: _Machine, detail: str) -> None:
        machine.pid, machine.pid_namespace, machine.link_up = 0, 0, False
        if machine.state != "failed":
            machine.state, machine.detail = "off", detail
        if machine.report >= 0:
            self._close_report(machine)
        # the kernel removes it with the machine's network namespace, but only some time later
        subprocess.run(["ip", "link", "delete", _port(machine.name)], capture_output=True, timeout=10)

    def set_link(self, name: str, action: str) -> None:
        """Plug a machine's network cable in (``heal``), out (``partition``), or into the other switch (``split``)."""
        machine = self.machines[name]
        if not machine.pid:
            raise ResilioError(f"{name} is powered off")
        if action != "partition":
            switch = _SWITCH if action == "heal" else _OTHER_SWITCH
            command = ["ip", "link", "set", _port(name), "master", switch]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=10)
        namespaces.set_link(_port(name), action != "partition")
        machine.link_up = action == "heal"

    def _on_report(self, machine: _Machine) -> None:
        text = os.read(machine.report, 4096).decode(errors="replace").strip()
        if not text and machine.state == "booting":
            text = "failed: the machine's init died"
        if text:
            machine.state, _, machine.detail = text.partition(": ")
        self._close_report(machine)

    def _close_report(self, machine: _Machine) -> None:
        self.selector.unregister(machine.report)
        os.close(machine.report)
        machine.report = -1

    def _on_child(self) -> None:
        self.children.recv(4096)
        by_pid = {machine.pid: machine for machine in self.machines.values() if machine.pid}
        while True:
            try:
                pid, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in by_pid:
                machine = by_pid[pid]
                if machine.report >= 0:
                    self._on_report(machine)
                self._powered_off(machine, "its first process ended")

    def _on_leash(self) -> None:
        if self.leash.recv(16) != b"keep\n":
            os._exit(1)
        self.selector.unregister(self.leash)
        self.leash.close()

    def _on_request(self) -> None:
        connection, _ = self.listener.accept()
        with connection:
            connection.settimeout(2.0)
            try:
                line = connection.makefile("rb").readline(65536)
                connection.sendall(msgspec.json.encode(self._obey(line)) + b"\n")
            except OSError:
                pass  # the client has gone; its request is carried out

    def _obey(self, line: bytes) -> Reply:
        try:
            request = msgspec.json.decode(line, type=Request)
            if request.action not in ("status", "stop") and request.machine not in self.machines:
                raise ResilioError(f"no machine {request.machine!r}; there are {', '.join(self.machines)}")
            match request.action:
                case "stop":
                    os._exit(0)
                case "boot":
                    self.boot(request.machine)
                case "crash":
                    self.crash(request.machine)
                case "partition" | "split" | "heal":
                    self.set_link(request.machine, request.action)
        except (ResilioError, OSError, msgspec.MsgspecError, subprocess.SubprocessError) as error:
            return Reply(error=str(error))
        return Reply(machines=[self._describe(machine) for machine in self.machines.values()])

    def _describe(self, machine: _Machine) -> MachineState:
        return MachineState(
            name=machine.name,
            state=machine.state,
            detail=machine.detail,
            boots=machine.boots,
            link_up=machine.link_up,
            address=self.spec.address(machine.name),
            pid_namespace=machine.pid_namespace,
        )


def _port(machine: str) -> str:
    return f"p-{machine}"


def _listen(layout: ClusterPaths) -> socket.socket:
    layout.control.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    os.chdir(layout.state)  # a socket's path may have 107 bytes only
    listener.bind(layout.control.name)
    layout.control.chmod(0o600)
    listener.listen(16)
    os.chdir("/")
    return listener


def main(argv: list[str]) -> int:
    """Become the rack in its own namespaces, ``rack STATE_DIRECTORY LEASH_FD``; the caller's child exits at once."""
    layout = ClusterPaths(Path(argv[0]))
    leash = socket.socket(fileno=int(argv[1]))
    spec = msgspec.json.decode(layout.spec.read_bytes(), type=ClusterSpec)
    os.setsid()
    own = namespaces.NEW_MOUNT | namespaces.NEW_UTS | namespaces.NEW_IPC | namespaces.NEW_NETWORK
    namespaces.unshare(own | namespaces.NEW_PID)
    if os.fork():
        os._exit(0)
    namespaces.make_mounts_private()
    namespaces.mount("proc", Path("/proc"))
    namespaces.set_hostname(f"rack-{spec.name}")
    try:
        Rack(spec, layout, leash).serve()
    except Exception as error:  # noqa: BLE001  ``up`` turns it into its one line
        leash.sendall(f"failed: {error}\n".encode())
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
