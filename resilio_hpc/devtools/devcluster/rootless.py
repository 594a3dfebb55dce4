"""A dev cluster without root and without namespaces: several slurmd on this host (``slurmd -N``), for quick tests.

Real Slurm, but every "machine" is this host: no power cuts, no network partitions, no private /tmp or NVMe, jobs run
as the calling user. Its processes are known by their SLURM_CONF; ``down`` kills everything that carries it.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from resilio_hpc.core.errors import CommandError, SlurmError, UsageError
from resilio_hpc.core.process import run
from resilio_hpc.devtools.devcluster import control, files, processes, requirements, services, slurm_conf
from resilio_hpc.devtools.devcluster.cluster import DevCluster
from resilio_hpc.devtools.devcluster.commands import SlurmCommands
from resilio_hpc.devtools.devcluster.messages import MachineState
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, ClusterSpec, Layout, layout, validate

_START_TIMEOUT_S = 20.0


class RootlessCluster(SlurmCommands):
    """A running rootless cluster: DevCluster's commands, without its failures."""

    @classmethod
    def start(
        cls,
        name: str = "dev",
        *,
        nodes: int = 4,
        cpus: int = 8,
        gpus: int = 0,
        gpu_type: str = "fake",
        slurmd_timeout_s: int = 10,
        conf: Sequence[str] = (),
        timeout_s: float = 60.0,
    ) -> RootlessCluster:
        """Start a cluster and return when all its nodes are idle; arguments and errors as DevCluster.start."""
        given = ClusterSpec(
            name=name,
            nodes=nodes,
            cpus=cpus,
            gpus=gpus,
            gpu_type=gpu_type,
            slurmd_timeout_s=slurmd_timeout_s,
            conf=tuple(conf),
            rootless=True,
        )
        return cls._start(validate(given), timeout_s)

    @classmethod
    def _start(cls, spec: ClusterSpec, timeout_s: float) -> RootlessCluster:
        where = layout(spec.name)
        requirements.check(spec)
        with control.claimed(where) as _:
            if _is_up(where):
                raise UsageError(
                    f"dev cluster {spec.name} is already up; end it with: resilio devcluster down --name {spec.name}"
                )
            processes.kill_rootless(where)
            control.sweep(where)
            environment = {"PATH": requirements.SEARCH_PATH}
            version = run(["slurmctld", "-V"], 10.0, env=environment).stdout.split()[-1]
            spec = msgspec.structs.replace(spec, slurm_version=version)
            account = pwd.getpwuid(os.getuid()).pw_name
            ports = _free_ports(spec.nodes + 1)
            text = slurm_conf.render_rootless_conf(spec, where, account, socket.gethostname().split(".")[0], ports)
            files.write_files(spec, where, text)
            cluster = cls(spec, where)
            try:
                cluster._start_daemons()
                cluster.wait_for_idle(timeout_s=timeout_s)
            except BaseException:
                processes.kill_rootless(where)
                raise
            where.control.touch()  # says that the start was finished
        return cluster

    @classmethod
    def find(cls, name: str = "dev") -> RootlessCluster:
        """Return the running rootless cluster called ``name``; raises SlurmError if it is not up."""
        where = layout(name)
        if not _is_up(where):
            raise SlurmError(f"dev cluster {name} is not up; start it with: resilio devcluster up --rootless")
        return cls(msgspec.json.decode(where.spec.read_bytes(), type=ClusterSpec), where)

    def __enter__(self) -> RootlessCluster:
        return self

    def command(self, machine: str, argv: Sequence[str], *, user: str = "root", cwd: str = "") -> list[str]:
        """Return the host command that runs ``argv``; every machine is this host, and every user the calling one."""
        if machine not in self.spec.machines:
            raise UsageError(f"no machine {machine!r}; there are {', '.join(self.spec.machines)}")
        return ["env", f"--chdir={cwd or self.shared}", *argv]

    def environment(self, extra: Mapping[str, str] | None = None, user: str = "root") -> dict[str, str]:
        """Return a login's environment with this cluster's SLURM_CONF."""
        own = {"SLURM_CONF": str(self.layout.etc / "slurm.conf"), "HOME": str(Path.home())}
        return {**services.ENVIRONMENT, **own, **(extra or {})}

    def machines(self) -> dict[str, MachineState]:
        """Every machine is this host."""
        return {
            name: MachineState(
                name=name,
                state="up",
                detail="(rootless: this host)",
                boots=1,
                link_up=True,
                address="127.0.0.1",
                pid_namespace=0,
            )
            for name in self.spec.machines
        }

    def kill_slurmctld(self) -> None:
        """SIGKILL slurmctld."""
        os.kill(int((self.layout.state / "slurmctld.pid").read_text()), 9)

    def start_slurmctld(self) -> None:
        """Start slurmctld again on its saved state."""
        self._daemon(["slurmctld"], CONTROLLER)

    def down(self, timeout_s: float = 20.0) -> None:
        """End the cluster and remove everything of it."""
        files.remove(self.name, timeout_s)

    def _start_daemons(self) -> None:
        state = self.layout.state
        places = {
            "key-file": self.layout.munge_key,
            "socket": state / "munge.socket",
            "pid-file": state / "munged.pid",
            "seed-file": state / "munge.seed",
            "log-file": self.layout.log(CONTROLLER) / "munged.log",
        }
        options = [f"--{option}={path}" for option, path in places.items()]
        self._daemon(["munged", "--force", *options], CONTROLLER)
        self.start_slurmctld()
        for node in self.nodes:
            self._daemon(["slurmd", "-N", node], node)

    def _daemon(self, argv: Sequence[str], machine: str) -> None:
        log = self.layout.log(machine) / "console.log"  # the daemon keeps its output open: it must not hold our pipes
        start = ["sh", "-c", f'exec "$@" </dev/null >>"{log}" 2>&1', "sh", *argv]
        try:
            run(start, _START_TIMEOUT_S, env=self.environment(), cwd=self.layout.state)
        except CommandError as error:
            raise SlurmError(f"{argv[0]} did not start ({error}); see {log.parent}") from None


def _is_up(where: Layout) -> bool:
    return where.control.is_file() and bool(processes.rootless_processes(where))


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]


def find(name: str = "dev") -> DevCluster | RootlessCluster:
    """Return the running cluster called ``name``; raises SlurmError if it is not up."""
    try:
        spec = msgspec.json.decode(layout(name).spec.read_bytes(), type=ClusterSpec)
    except (OSError, msgspec.MsgspecError):
        raise SlurmError(f"dev cluster {name} is not up; start it with: resilio devcluster up --name {name}") from None
    return RootlessCluster.find(name) if spec.rootless else DevCluster.find(name)
