"""``resilio devcluster …``: a real Slurm cluster on this machine, and the failures to rehearse on it."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from resilio_hpc.cli.common.parser import Parser
from resilio_hpc.core.errors import CommandError, ResilioError, UsageError
from resilio_hpc.core.terminal import raw
from resilio_hpc.devtools.devcluster import DevCluster, RackMachines, find, image, names, remove, start, start_rootless
from resilio_hpc.devtools.devcluster.machines import ClusterMachines
from resilio_hpc.devtools.devcluster.spec import CONTROLLER, HOST_SERIES, SHARED_MOUNTS, SLURM_SERIES
from resilio_hpc.prolog_epilog.hooks.hook_files import HookSettings, install, package_folder, render_conf

_MACHINE_VERBS: dict[str, tuple[Callable[[RackMachines, str], None], str]] = {
    "crash": (RackMachines.crash, "power cut: kill everything on a machine, silently"),
    "boot": (RackMachines.boot, "power a crashed machine on again"),
    "partition": (RackMachines.partition, "pull a machine's network cable"),
    "split": (RackMachines.split, "cut a machine off from all but those that were split before it"),
    "heal": (RackMachines.heal, "plug a machine's network cable in again"),
    "hang-shared": (RackMachines.hang_shared, "let /shared hang on a node (up --shared-mount fuse)"),
    "release-shared": (RackMachines.release_shared, "let /shared answer again"),
    "kill-slurmd": (RackMachines.kill_slurmd, "SIGKILL a node's slurmd"),
    "start-slurmd": (RackMachines.start_slurmd, "start a node's slurmd again"),
}
_CLUSTER_VERBS: dict[str, tuple[Callable[[ClusterMachines], None], str]] = {
    "kill-slurmctld": (lambda machines: machines.kill_slurmctld(), "SIGKILL the controller daemon"),
    "start-slurmctld": (lambda machines: machines.start_slurmctld(), "start the controller daemon again"),
}


def main(argv: list[str]) -> int:
    """Run ``resilio devcluster ARGV``; return the exit code (2 for a usage mistake, 1 for a failure)."""
    try:
        own, command = _split(argv)
        arguments = _parser(separated=bool(command)).parse_args(own)
        if command:
            arguments.command = [*arguments.command, *command]
        for signum in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, _interrupt)
        result: int = arguments.call(arguments)
        return result
    except UsageError as error:
        print(f"resilio devcluster: {error}", file=sys.stderr)
        return 2
    except (ResilioError, OSError) as error:
        print(f"resilio devcluster: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("resilio devcluster: interrupted", file=sys.stderr)
        return 130


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """Return the words for ``resilio devcluster run``, and the command behind ``--``, options of which are its own."""
    if argv[:1] != ["run"] or "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser(separated: bool) -> argparse.ArgumentParser:
    parser = Parser(
        prog="resilio devcluster",
        description="A real Slurm cluster on this machine, and the failures to rehearse on it.",
        formatter_class=argparse.RawTextHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, call: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = verbs.add_parser(name, help=text, description=text)
        sub.set_defaults(call=call)
        if name != "list":
            sub.add_argument("--name", default="dev", help="which cluster (default: dev)")
        return sub

    _add_up_options(verb("up", _up, "start a cluster"))
    verb("down", _down, "end a cluster and remove everything of it, also what a killed start left")
    verb("status", _status, "machines, nodes and versions").add_argument("--json", action="store_true")
    verb("list", _list, "all clusters on this host").add_argument("--json", action="store_true")
    shell = verb("shell", _shell, "an interactive shell on a machine (ctl is the login node)")
    shell.add_argument("machine", nargs="?", default=CONTROLLER)
    shell.add_argument("--user", default="root", help="root or user")
    runner = verb("run", _run, "run a command on a machine: run MACHINE [--name N] -- COMMAND …")
    runner.add_argument("--timeout", type=float, default=600.0, metavar="S")
    runner.add_argument("--user", default="root", help="root or user")
    runner.add_argument("machine")
    runner.add_argument("command", nargs="*" if separated else argparse.REMAINDER)
    for name, (_, text) in _MACHINE_VERBS.items():
        verb(name, _machine_verb, text).add_argument("machine", help="ctl, n1, n2, …")
    for name, (_, text) in _CLUSTER_VERBS.items():
        verb(name, _cluster_verb, text)
    return parser


def _add_up_options(up: argparse.ArgumentParser) -> None:
    up.add_argument("--nodes", type=int, default=4)
    up.add_argument("--cpus", type=int, default=8, help="CPUs that each node claims (default 8)")
    up.add_argument("--gpus", type=int, default=0, help="fake GPUs per node")
    up.add_argument("--gpu-type", default="h100", metavar="NAME[,NAME]",
                    help="Slurm's name of them, or one for each node (default h100)")  # fmt: skip
    up.add_argument("--slurm", default=HOST_SERIES, choices=list(SLURM_SERIES), help="Slurm series")
    up.add_argument("--accounting", action="store_true", help="with MariaDB and slurmdbd")
    up.add_argument("--bind", action="append", default=[], metavar="PATH", help="show a host path on every machine")
    up.add_argument("--slurmd-timeout", type=int, default=10, metavar="S", help="SlurmdTimeout (default 10)")
    up.add_argument(
        "--shared-mount", default="bind", choices=SHARED_MOUNTS, help="fuse: /shared can hang; caching: as NFS"
    )
    up.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="slurm.conf line (repeatable)")
    up.add_argument(
        "--private-tmp", action="store_true", help="/tmp and /dev/shm of each job's own (job_container/tmpfs)"
    )
    up.add_argument("--hooks", type=Path, metavar="DIR", help="with our prolog and epilog, written to DIR")
    up.add_argument("--timeout", type=float, default=60.0, metavar="S", help="give up when not idle by then")
    up.add_argument("--rootless", action="store_true", help="no root, no namespaces: several slurmd on this host")


def _up(arguments: argparse.Namespace) -> int:
    size: Any = {
        "nodes": arguments.nodes,
        "cpus": arguments.cpus,
        "gpus": arguments.gpus,
        "gpu_type": arguments.gpu_type,
        "slurmd_timeout_s": arguments.slurmd_timeout,
        "conf": arguments.conf,
        "timeout_s": arguments.timeout,
    }
    cluster: DevCluster[ClusterMachines]
    if arguments.rootless:
        beyond = arguments.accounting or arguments.bind or arguments.hooks or arguments.shared_mount != "bind"
        beyond = beyond or arguments.private_tmp
        if arguments.slurm != HOST_SERIES or beyond:
            raise UsageError(
                "--rootless runs this host's own Slurm: without --slurm, --accounting, --bind, --hooks, --shared-mount"
            )
        cluster = start_rootless(arguments.name, **size)
    else:
        if arguments.slurm != HOST_SERIES and not image.is_built(arguments.slurm):
            print(f"building a root with Slurm {arguments.slurm}: a minute or two, once", file=sys.stderr)
        if arguments.hooks:
            _install_hooks(arguments.hooks.absolute(), arguments.bind, size["conf"])
        cluster = start(
            arguments.name,
            slurm=arguments.slurm,
            accounting=arguments.accounting,
            binds=arguments.bind,
            shared_mount=arguments.shared_mount,
            private_tmp=arguments.private_tmp,
            **size,
        )
    print(
        f"{cluster.name}: Slurm {cluster.slurm_version}, {len(cluster.nodes)} nodes idle; /shared is {cluster.shared}"
    )
    return 0


def _install_hooks(where: Path, binds: list[str], conf: list[str]) -> None:
    """Install the files and lines of ``resilio install-hooks``; lines that were given already stay unchanged."""
    settings = HookSettings(where=where, package=package_folder())
    install(settings)
    binds += [str(where), *([settings.package] if settings.package else [])]
    conf[:0] = [*render_conf(settings), "PrologFlags=Alloc"]


def _down(arguments: argparse.Namespace) -> int:
    if remove(arguments.name):
        print(f"{arguments.name}: ended, nothing left")
        return 0
    print(f"{arguments.name}: there is no cluster of yours by this name")
    return 0


def _status(arguments: argparse.Namespace) -> int:
    status = find(arguments.name).status()
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(status)).decode())
        return 0
    print(f"{status.name}: Slurm {status.slurm_version} ({status.slurm}), /shared is {status.shared}")
    if status.problem:
        print(f"  slurmctld: {status.problem}")
    for machine in status.machines:
        remark = "network cut" if machine.state == "up" and not machine.link_up else machine.detail
        columns = f"  {machine.name:<5} {machine.address:<15} {machine.state:<8} {machine.slurm_state:<12} {remark}"
        print(columns.rstrip())
    return 0


def _list(arguments: argparse.Namespace) -> int:
    known = {name: _is_up(name) for name in names()}
    if arguments.json:
        print(msgspec.json.encode(known).decode())
    else:
        for name, up in known.items():
            print(f"{name:<32} {'up' if up else 'dead (remove with: resilio devcluster down --name ' + name + ')'}")
    return 0


def _is_up(name: str) -> bool:
    try:
        find(name)
    except ResilioError:
        return False
    return True


def _shell(arguments: argparse.Namespace) -> int:
    cluster = find(arguments.name)
    command = cluster.machines.command(arguments.machine, ["bash", "-i"], user=arguments.user)
    prompt = {"PS1": f"[{cluster.name}] \\u@\\h:\\w\\$ ", "TERM": os.environ.get("TERM", "dumb")}
    os.execvpe(command[0], command, cluster.machines.environment(prompt, arguments.user))


def _run(arguments: argparse.Namespace) -> int:
    if not arguments.command:
        raise UsageError("run: give a command after the machine's name: resilio devcluster run ctl -- sinfo")
    cluster = find(arguments.name)
    try:
        done = cluster.run(arguments.machine, arguments.command, arguments.timeout, user=arguments.user, check=False)
    except CommandError as error:
        raw(sys.stdout).write(error.stdout)
        raw(sys.stderr).write(error.stderr)
        raise
    raw(sys.stdout).write(done.stdout)  # the command's own output, colours included
    raw(sys.stderr).write(done.stderr)
    return done.returncode if done.returncode >= 0 else 128 - done.returncode


def _machine_verb(arguments: argparse.Namespace) -> int:
    call, _ = _MACHINE_VERBS[arguments.verb]
    call(_rack_machines(arguments), arguments.machine)
    return 0


def _cluster_verb(arguments: argparse.Namespace) -> int:
    call, _ = _CLUSTER_VERBS[arguments.verb]
    call(find(arguments.name).machines)
    return 0


def _rack_machines(arguments: argparse.Namespace) -> RackMachines:
    cluster = find(arguments.name)
    if not isinstance(cluster.machines, RackMachines):
        raise UsageError(f"{arguments.verb} needs machines of their own, and {cluster.name} is --rootless")
    return cluster.machines
