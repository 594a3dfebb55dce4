"""The first process (PID 1) of one machine of a dev cluster: builds its file system, starts its services, reaps.

It is forked from the rack (rack.py) into namespaces of its own. Killing it is a power cut: the kernel then kills
everything on that machine. What is in memory (/, /tmp, /dev/shm, /run) is gone with it; /nvme, /var/log/slurm, the
daemons' state and /shared stay.
"""

from __future__ import annotations

import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from resilio_hpc.devtools.devcluster import namespaces, services, shared_directory
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, USER, USER_ID, ClusterPaths, ClusterSpec

_DEVICES = {"null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9), "tty": (5, 0)}
_PSEUDO = {
    *("proc", "sysfs", "devtmpfs", "devpts", "tmpfs", "ramfs", "cgroup", "cgroup2", "mqueue", "hugetlbfs", "debugfs"),
    *("tracefs", "securityfs", "pstore", "bpf", "fusectl", "configfs", "autofs", "binfmt_misc", "rpc_pipefs", "nsfs"),
}
_FIRST_WAIT_S = 60.0
_REBOOT_WAIT_S = 1.0


def build_root(spec: ClusterSpec, layout: ClusterPaths, machine: str, mountinfo: str) -> Path:
    """Mount the machine's whole file system below its state directory and return its root directory."""
    home = layout.machine(machine)
    layers, root = home / "layers", home / "root"
    namespaces.mount("tmpfs", layers)
    (layers / "upper").mkdir()
    (layers / "work").mkdir()
    options = f"lowerdir={spec.root},upperdir={layers / 'upper'},workdir={layers / 'work'}"
    namespaces.mount("overlay", root, options)
    if spec.root == "/":
        for path in disk_mounts(mountinfo):
            namespaces.bind(Path(path), root / path.lstrip("/"))
    namespaces.mount("proc", root / "proc")
    namespaces.mount("sysfs", root / "sys")
    namespaces.mount("tmpfs", root / "sys/fs/cgroup", "mode=755")  # no cgroups, so none can be left behind
    namespaces.mount("tmpfs", root / "tmp", "mode=1777")
    namespaces.mount("tmpfs", root / "run", "mode=755")
    _make_dev(root / "dev", spec)
    for source, target in (
        (layout.nvme(machine), "nvme"),
        (layout.log(machine), "var/log/slurm"),
        (layout.spool(machine), "var/spool/slurmd"),
        (layout.machine(machine) / "state", "var/lib/slurm"),
        (layout.etc, "etc/slurm"),
    ):
        namespaces.bind(source, root / target)
    shared_directory.mount(spec, layout, machine, root / "shared")
    for path in spec.binds:
        namespaces.bind(Path(path), root / path.lstrip("/"))
    return root


def disk_mounts(mountinfo: str) -> list[str]:
    """Return mount points of real file systems below / (a separate /usr or /home), outermost first, by mountinfo.

    See proc(5).
    """
    found: list[str] = []
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        path = before.split()[4].encode().decode("unicode_escape")
        if (
            path == "/"
            or after.split()[0] in _PSEUDO
            or path.startswith(("/proc/", "/sys/", "/dev/", "/run/", "/tmp/"))
        ):
            continue
        if not any(path == other or path.startswith(other + "/") for other in found):
            found.append(path)
    return found


def _make_dev(dev: Path, spec: ClusterSpec) -> None:
    namespaces.mount("tmpfs", dev, "mode=755,size=1m")
    devices = {name: (number, 0o666) for name, number in _DEVICES.items()}
    # gres/gpu needs character devices; these act like /dev/null, so nothing can be broken through them
    devices |= {Path(spec.gpu_path(i)).name: ((1, 3), 0o666) for i in range(spec.gpus)}
    for name, ((major, minor), mode) in devices.items():
        os.mknod(dev / name, stat.S_IFCHR | mode, os.makedev(major, minor))
        (dev / name).chmod(mode)
    for name, target in (("fd", "/proc/self/fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        (dev / name).symlink_to(target)
    namespaces.mount("devpts", dev / "pts", "newinstance,ptmxmode=0666,mode=620")
    (dev / "ptmx").symlink_to("pts/ptmx")
    namespaces.mount("tmpfs", dev / "shm", "mode=1777")


def _make_etc(spec: ClusterSpec, hosts: str, machine: str, munge_key: bytes) -> None:
    """Make the files of the machine's own /etc (in the memory layer: the image below stays unchanged)."""
    _replace(Path("/etc/hosts"), hosts)
    _replace(Path("/etc/hostname"), machine + "\n")
    for path, line in (
        ("/etc/passwd", f"{USER}:x:{USER_ID}:{USER_ID}:ordinary user:/shared/home/{USER}:/bin/bash\n"),
        ("/etc/group", f"{USER}:x:{USER_ID}:\n"),
    ):
        with Path(path).open("a") as file:
            file.write(line)
    key = Path("/run/munge.key")
    key.touch(0o600)
    key.write_bytes(munge_key)
    for directory in ("/run/munge", "/run/slurm"):
        Path(directory).mkdir(mode=0o755)


def _replace(path: Path, text: str) -> None:
    path.unlink(missing_ok=True)
    path.write_text(text)


def run_init(spec: ClusterSpec, layout: ClusterPaths, machine: str, reboot: bool, wired: int, report: int) -> None:
    """Be the machine's init, for ever. ``report`` gets ``up`` or ``failed: …``; ``wired`` gives a byte for eth0."""
    try:
        hosts = (layout.etc / "hosts").read_text()
        munge_key = layout.munge_key.read_bytes()
        namespaces.make_root(build_root(spec, layout, machine, Path("/proc/self/mountinfo").read_text()))
        namespaces.set_hostname(machine)
        _make_etc(spec, hosts, machine, munge_key)
        namespaces.set_link("lo", True)
        if os.read(wired, 1) != b"w":
            raise OSError("the network cable was not plugged in")
        namespaces.set_address("eth0", spec.address(machine), "255.255.255.0")
        namespaces.set_link("eth0", True)
        _start_services(spec, machine, reboot)
        os.write(report, b"up\n")
    except Exception as error:  # noqa: BLE001  the message is all that leaves this process
        os.write(report, f"failed: {error}\n".encode())
        os._exit(1)
    os.close(report)
    _reap_for_ever()


def _start_services(spec: ClusterSpec, machine: str, reboot: bool) -> None:
    start_and_wait(services.MUNGED.argv)
    if machine == CONTROLLER:
        if spec.accounting:
            start_accounting(spec.name, start_and_wait, start_in_background)
        start_and_wait(services.SLURMCTLD.argv)
        wait_until_serving(services.SLURMCTLD, services.SLURMCTLD_PORT)
    else:
        # a slurmd that cannot register at once tries again only after seconds; a rebooted node must not depend on ctl
        patience_s = _REBOOT_WAIT_S if reboot else _FIRST_WAIT_S
        wait_for_port(spec.address(CONTROLLER), services.SLURMCTLD_PORT, patience_s)
        start_and_wait([*services.SLURMD.argv, "-N", machine, *(["-b"] if reboot else [])])
        # slurmctld may not have noticed that a node was off for a second, and srun gives up one that refuses it
        wait_until_serving(services.SLURMD, services.SLURMD_PORT)


def start_and_wait(argv: Sequence[str]) -> None:
    """Run a daemon's start command (which returns once it has daemonised); raises OSError if it fails."""
    _, status = os.waitpid(start_in_background(argv), 0)
    code = os.waitstatus_to_exitcode(status)
    if code != 0:
        raise OSError(f"{argv[0]} did not start (exit code {code}): {services.last_complaint(argv[0])}")


def start_in_background(argv: Sequence[str]) -> int:
    """Start a program whose output goes to the machine's console log; returns its pid."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            log = os.open("/var/log/slurm/console.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            null = os.open("/dev/null", os.O_RDONLY)
            for fd, target in ((null, 0), (log, 1), (log, 2)):
                os.dup2(fd, target)
            os.execve(argv[0], list(argv), services.ENVIRONMENT)
        finally:
            os._exit(127)
    return pid


def wait_until_serving(service: services.Service, port: int) -> None:
    """Wait until a daemonised service listens; raises OSError with its complaint if it dies instead."""
    while not _is_listening(port):
        time.sleep(0.01)
        reap()
        if service.name not in _running_programs():
            raise OSError(f"{service.name} did not start: {services.last_complaint(service.name)}")


def _is_listening(port: int) -> bool:
    """Return whether a process of this machine listens there. A connection would be a line in the daemon's log."""
    ends = (f":{port:04X}", "0A")  # local address and state, as in proc(5)
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table[1:]]
    return any(row[1].endswith(ends[0]) and row[3] == ends[1] for row in rows)


def _running_programs() -> set[str]:
    """Return names of this machine's processes (not by pid files: some daemons write theirs late)."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/comm"):
        try:
            found.add(entry.read_text().strip())
        except OSError:
            continue  # it ended meanwhile
    return found


def wait_for_port(address: str, port: int, timeout_s: float) -> bool:
    """Return whether ``address:port`` accepts connections within ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            if probe.connect_ex((address, port)) == 0:
                return True
        time.sleep(0.005)
    return False


def _reap_for_ever() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
    while True:
        reap()
        signal.sigwait({signal.SIGCHLD})


def reap() -> None:
    """Reap every process that ended here and has no other parent."""
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        pass


_DATA = Path("/var/lib/slurm/mariadb")  # on the controller's disk: accounting survives a power cut
_SOCKET = Path("/run/mysqld/mysqld.sock")
_SERVER = (
    "/usr/sbin/mariadbd",
    "--no-defaults",
    "--user=root",
    f"--datadir={_DATA}",
    f"--socket={_SOCKET}",
    "--skip-networking",
    "--innodb-buffer-pool-size=32M",
    "--innodb-log-file-size=8M",
    "--innodb-flush-log-at-trx-commit=2",
    "--skip-log-bin",
)
_INSTALL = (
    "/usr/bin/mariadb-install-db",
    "--no-defaults",
    "--user=root",
    f"--datadir={_DATA}",
    "--skip-test-db",
    "--auth-root-authentication-method=socket",  # slurmdbd is root there, and needs no password
    "--innodb-log-file-size=8M",
    "--innodb-buffer-pool-size=32M",
)
_TIMEOUT_S = 30.0


def start_accounting(
    cluster: str, run: Callable[[tuple[str, ...]], None], background: Callable[[tuple[str, ...]], int]
) -> None:
    """Start both and register ``cluster``; ``run`` waits for its command, ``background`` does not."""
    _SOCKET.parent.mkdir(mode=0o700)
    if not (_DATA / "mysql").is_dir():
        run(_INSTALL)
    background(_SERVER)
    _wait_for(_SOCKET.exists, "mariadbd")
    run(services.SLURMDBD.argv)
    try:
        run(
            ("/usr/bin/timeout", str(_TIMEOUT_S), "/bin/sh", "-c", _REGISTER, "sh", cluster, services.SLURMDBD.pid_file)
        )
    except OSError:
        raise OSError(f"slurmdbd does not answer: {services.last_complaint('slurmdbd')}") from None


# sacctmgr fails until slurmdbd has made its tables; for a known cluster it prints that and fails
_REGISTER = """
until sacctmgr --noheader list cluster >/dev/null 2>&1; do kill -0 "$(cat "$2")" || exit 1; sleep 0.05; done
sacctmgr --noheader list cluster format=cluster | grep -qw -- "$1" || sacctmgr --immediate add cluster "$1"
"""


def _wait_for(ready: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + _TIMEOUT_S
    while not ready():
        if time.monotonic() > deadline:
            raise OSError(f"{what} on {CONTROLLER} is not ready after {_TIMEOUT_S:g} s")
        time.sleep(0.01)
