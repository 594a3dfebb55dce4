"""The way of nodes to each other: this machine's name, loopback, ports."""

from __future__ import annotations

import ipaddress
import socket
import time
from pathlib import Path

from resilio_hpc.core.errors import LaunchError, UsageError
from resilio_hpc.doctor.finding import DoctorFinding, DoctorView, failed, notice, ok, warning
from resilio_hpc.launch.process import own_address
from resilio_hpc.slurm.client.allocation import detect

_SLOW_S = 2.0
_FEW_PORTS = 1000
_ANSWER_S = 3.0


def host_name(view: DoctorView) -> DoctorFinding:
    """Look this machine's name up, and find the address that other nodes reach, as agents do."""
    name = view.environment.get("SLURMD_NODENAME") or socket.gethostname()
    others = _others(view, name)
    view.mark(f"the look-up of {name}")
    began = time.monotonic()
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        make = failed if view.has_slurm else warning
        return make(
            f"{name} has no address: {getattr(error, 'strerror', error)}",
            "Nodes of a job reach each other by these names. A launch on this machine alone works.",
            f"give {name} its address in /etc/hosts, or in DNS",
        )
    took = time.monotonic() - began
    addresses = list(dict.fromkeys(str(info[4][0]) for info in found))
    seen = f"{name} is {', '.join(addresses[:3])}"
    if took > _SLOW_S:
        return warning(
            f"{seen}, found after {took:.1f} s",
            "Ranks look names up when they start: each start takes as much longer.",
            f"put {name} into /etc/hosts, or mend the name servers in /etc/resolv.conf",
        )
    try:
        used = own_address.reachable(name, others)
    except LaunchError:
        return warning(
            f"{seen}, a loopback address",
            "No other node reaches this one by its name. A launch on this machine alone works.",
            f"give {name} its address in /etc/hosts, in the place of {addresses[0]}",
        )
    if used != name:
        return notice(
            f"{seen}, a loopback address; other nodes are given {used}",
            "Agents and gloo find the right address by themselves. Programs of your own may not.",
            f"give {name} its address in /etc/hosts, in the place of {addresses[0]}",
        )
    return ok(seen)


def _others(view: DoctorView, name: str) -> list[str]:
    try:
        allocation = detect(view.environment)
    except UsageError:
        return []
    return [node for node in allocation.nodes if node != name] if allocation else []


def ports(view: DoctorView) -> DoctorFinding:
    """Listen as controllers do, and on a port that the kernel chooses, as torch's store does."""
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    count = high - low + 1
    seen = f"{count} ports, {low} to {high} (net.ipv4.ip_local_port_range)"
    todo = 'as root: sysctl net.ipv4.ip_local_port_range="32768 60999"; or end what holds them (ss -tan)'
    view.mark("a listening socket")
    try:
        socket.create_server(("", 0)).close()
        _listen_as_controller()
    except OSError as error:  # zmq's errors are OSErrors, too
        return failed(
            f"no port is free: {error.strerror or error}; {seen}",
            "Controllers and torch's store listen on ports, and each connection takes one.",
            todo,
        )
    if count < _FEW_PORTS:
        return warning(seen, "Ranks that start again and again use them up, for a minute each.", todo)
    return ok(seen)


def _listen_as_controller() -> None:
    """Listen as a controller does. Raises OSError. Where packages are missing, their own check says so."""
    try:
        import zmq

        from resilio_hpc.core import wire
    except ImportError:
        return
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        wire.listen(context, wire.Keys.derive(wire.new_secret()), "*")[0].close()
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error
    finally:
        context.term()


def loopback(view: DoctorView) -> DoctorFinding:
    """Send bytes through 127.0.0.1, and through the address of this machine's name."""
    view.mark("a connection to 127.0.0.1")
    try:
        _talk("127.0.0.1")
    except OSError as error:
        return failed(
            f"127.0.0.1 does not work: {error.strerror or error}",
            "The agents of a launch on one machine, and torch's store, meet there.",
            "as root: ip link set lo up; a firewall must let lo pass",
        )
    address = _own_ipv4()
    if not address or ipaddress.ip_address(address).is_loopback:
        return ok("127.0.0.1 works")
    view.mark(f"a connection to {address}")
    try:
        _talk(address)
    except OSError as error:
        return failed(
            f"this machine does not reach itself at {address}: {error.strerror or error}",
            "Agents and ranks meet at the address of its name.",
            "mend that address in /etc/hosts or DNS, or the firewall's rules",
        )
    return ok(f"127.0.0.1 and {address} work")


def _talk(address: str) -> None:
    """Connect to a port of ``address`` and send a byte there. Raises OSError."""
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(_ANSWER_S)
        with socket.create_connection(listener.getsockname()[:2], _ANSWER_S) as caller:
            caller.sendall(b"1")
            answered, _ = listener.accept()
            with answered:
                answered.settimeout(_ANSWER_S)
                if answered.recv(1) != b"1":
                    raise OSError("the connection was closed")


def _own_ipv4() -> str:
    """Return the address of this machine's name; "" where it has none, which another check says."""
    try:
        found = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    return str(found[0][4][0]) if found else ""
