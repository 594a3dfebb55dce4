"""The environment, the command and the CPUs of one rank. Pure.

Variables are torchrun's (torch.distributed.elastic, LocalElasticAgent), so a script need not know its launcher, and
this package's, which ``resilio_hpc.train`` and ``resilio_hpc.ckpt`` read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from resilio_hpc.ckpt.coordination.coordinator import READ_AHEAD_VARIABLE
from resilio_hpc.core import process_title
from resilio_hpc.core.errors import UsageError
from resilio_hpc.core.rank_link import COLLECTIVE_VARIABLE, STANDBY_VARIABLE
from resilio_hpc.core.stack_dump import STACK_VARIABLE
from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.rank_layout import fill, round_layout, values_of
from resilio_hpc.launch.process.process_tree import TOKEN_VARIABLE
from resilio_hpc.launch.workers import interception

RESTARTS_VARIABLE = "RESILIO_RANK_RESTARTS"  # of one rank alone, in this round: lone_restarts
INTERNAL_PREFIXES = ("RESILIO_SETTINGS", "RESILIO_LINK")


class RankPlacement(Struct, frozen=True):
    """The place of one rank in the world of one round."""

    node_rank: int
    node_count: int
    local_rank: int
    local_world_size: int
    rank: int
    world_size: int


class RoundSetting(Struct, frozen=True):
    """Settings that all ranks of one node share in one round."""

    run_id: str
    run_dir: Path
    round: int
    epoch: int
    restart_count: int  # rounds before this one
    master_addr: str
    master_port: int
    agent_socket: Path
    arena_dir: Path
    restore: str  # see ``ckpt.coordination.agent_coordinator.parse_restore_point``
    read_ahead: Path  # the file that names the step which is being read ahead
    collective_s: float = 0.0  # how long a rank may wait in a collective; 0: not known
    gpu: str = ""  # the type of GPU that the round's layout is planned for, with --layout auto


def rank_environment(base: dict[str, str], slots: int, token: str, watched: Sequence[str] = ()) -> dict[str, str]:
    """Return the environment of the spawner, which its ranks inherit.

    It is Slurm's and the user's, and holds the variables that are read at load time. ``watched``: families
    of communication libraries whose calls are noted.
    """
    environment = {key: value for key, value in base.items() if not key.startswith(INTERNAL_PREFIXES)}
    if slots > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does
    environment.pop(process_title.OWNER_VARIABLE, None)
    environment[TOKEN_VARIABLE] = token
    return environment | (interception.preload(environment, watched))


def rank_variables(
    base: Mapping[str, str], options: LaunchOptions, placement: RankPlacement, setting: RoundSetting, error_file: Path
) -> dict[str, str]:
    """Return the variables to set on top of ``base``, the agent's own environment.

    Raises UsageError when ``--virtual-local-rank`` has no GPU for this rank, or ``--layout`` does not fit the world.
    """
    return (
        _torchrun_variables(base, options, placement, setting)
        | {"TORCHELASTIC_ERROR_FILE": str(error_file)}
        | _device_variables(base, options, placement)
        | round_layout(options, placement.world_size, setting.gpu).variables()
        | {
            "RESILIO_RUN_ID": setting.run_id,
            "RESILIO_RUN_DIR": str(setting.run_dir),
            "RESILIO_CHECKPOINT_DIR": str(setting.run_dir / "checkpoints"),
            "RESILIO_AGENT_SOCKET": str(setting.agent_socket),
            "RESILIO_ROUND": str(setting.round),
            "RESILIO_EPOCH": str(setting.epoch),
            RESTARTS_VARIABLE: "0",
            "RESILIO_ARENA_DIR": str(setting.arena_dir),
            "RESILIO_RESTORE": setting.restore,
            interception.CALLS_VARIABLE: str(
                interception.ring_file(setting.arena_dir, setting.round, placement.local_rank)
            ),
            STACK_VARIABLE: str(stack_file(error_file)),
            READ_AHEAD_VARIABLE: str(setting.read_ahead),
            COLLECTIVE_VARIABLE: f"{setting.collective_s:g}",
            # LOCAL_RANK is 0 everywhere under --virtual-local-rank; arenas and the agent need the real one
            "RESILIO_LOCAL_RANK": str(placement.local_rank),
        }
    )


def standby_variables(variables: Mapping[str, str], number: int, directory: Path) -> dict[str, str]:
    """Return what a process without a rank has instead of a rank's ``variables``. ``directory``: for its call ring.

    Its ranks are no numbers, so that a script which depends on them too early ends, and does not take a wrong one.
    """
    error_file = Path(variables["TORCHELASTIC_ERROR_FILE"]).with_name(f"standby{-number}.json")
    return dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK", "RESILIO_LOCAL_RANK"), "standby") | {
        STANDBY_VARIABLE: str(number),
        "RESILIO_RESTORE": "",
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        STACK_VARIABLE: str(stack_file(error_file)),
        interception.CALLS_VARIABLE: str(directory / f"standby-calls{number}"),
    }


def stack_file(error_file: Path) -> Path:
    """Return where a rank writes its stacks when it is asked: beside its error file."""
    return error_file.with_suffix(".stacks")


def _torchrun_variables(
    base: Mapping[str, str], options: LaunchOptions, placement: RankPlacement, setting: RoundSetting
) -> dict[str, str]:
    variables = {
        "RANK": str(placement.rank),
        "WORLD_SIZE": str(placement.world_size),
        "LOCAL_WORLD_SIZE": str(placement.local_world_size),
        "GROUP_RANK": str(placement.node_rank),
        "GROUP_WORLD_SIZE": str(placement.node_count),
        "ROLE_NAME": options.role,
        "ROLE_RANK": str(placement.rank),  # a run has one role: the whole world
        "ROLE_WORLD_SIZE": str(placement.world_size),
        "MASTER_ADDR": setting.master_addr,
        "MASTER_PORT": str(setting.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(setting.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(options.max_restarts),
        "TORCHELASTIC_RUN_ID": options.torchelastic_run_id or setting.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(options.torch),  # the agent, not rank 0, hosts the store
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(options.signals_to_handle),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": base.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    if "OMP_NUM_THREADS" not in base and placement.local_world_size > 1:
        variables["OMP_NUM_THREADS"] = "1"
    return variables


def _device_variables(base: Mapping[str, str], options: LaunchOptions, placement: RankPlacement) -> dict[str, str]:
    if not options.virtual_local_rank:
        return {"LOCAL_RANK": str(placement.local_rank)}
    visible = base.get("CUDA_VISIBLE_DEVICES")
    gpus = [gpu.strip() for gpu in visible.split(",") if gpu.strip()] if visible is not None else None
    if gpus is None:
        gpu = str(placement.local_rank)
    elif placement.local_rank < len(gpus):
        gpu = gpus[placement.local_rank]
    else:
        raise UsageError(
            f"--virtual-local-rank: CUDA_VISIBLE_DEVICES={visible} has no GPU for local rank {placement.local_rank}"
        )
    return {"LOCAL_RANK": "0", "CUDA_VISIBLE_DEVICES": gpu}


def rank_argv(
    options: LaunchOptions, local_rank: int, placement: RankPlacement | None = None, gpu: str = ""
) -> tuple[str, ...]:
    """Return program and arguments; ``${local_rank}`` in an argument becomes the local rank, as under torchrun.

    With ``--fill-arguments`` the round's numbers are filled in too, where ``placement`` holds them. Raises UsageError.
    """
    arguments = tuple(argument.replace("${local_rank}", str(local_rank)) for argument in options.script_args)
    if options.fill_arguments and placement is not None:
        layout = round_layout(options, placement.world_size, gpu)
        arguments = fill(arguments, values_of(layout, placement.node_count, placement.local_world_size))
    return (options.script, *arguments)


def cpu_share(cpus: list[int], local_rank: int, local_world_size: int) -> tuple[int, ...] | None:
    """Return a rank's contiguous share of the CPUs that Slurm allotted; None where there are fewer CPUs than ranks."""
    if len(cpus) < local_world_size:
        return None
    begin = len(cpus) * local_rank // local_world_size
    end = len(cpus) * (local_rank + 1) // local_world_size
    return tuple(cpus[begin:end])
