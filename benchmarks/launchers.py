"""The launchers under test, each with its defaults and with the best settings that its documentation names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ROOT / ".venv" / "bin"
PEERS = ROOT / ".venv-peers" / "bin"
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""The ranks get a store of their own, so that no address of an earlier life is left in it."""


@dataclass(frozen=True)
class Launcher:
    """A launcher's command line up to the script."""

    name: str
    settings: str
    program: Path
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict, hash=False)
    companion: tuple[str, ...] = ()
    """A process that must run beside it. `{port}` stands for a free port, here and in the environment."""

    def argv(self, ranks: int, script: Path, arguments: Sequence[str]) -> list[str]:
        return [str(self.program), f"--nproc-per-node={ranks}", *self.options, str(script), *arguments]


OUR_LAUNCHER = Launcher("resilio-launch", "defaults", OURS / "resilio-launch")
STANDALONE = ("--standalone", "--max-restarts=3")
FAULT_TOLERANCE = (*STANDALONE, "--ignore-missing-fault-tol-cfg")
# dlrover-run 0.6.1 starts its master through a class of torch whose arguments changed since, and fails; with a master
# that already runs, as on a cluster, it works. Job name and address are how it is told about one.
DLROVER_MASTER = (
    *(str(PEERS / "python"), "-m", "dlrover.python.master.main"),
    *("--platform=local", "--job_name=recovery", "--node_num=1", "--port={port}"),
)
DLROVER_ADDRESS = {"DLROVER_MASTER_ADDR": "127.0.0.1:{port}", "JOB_NAME": "recovery"}
LAUNCHERS = (
    OUR_LAUNCHER,
    Launcher("resilio-launch", "--no-intercept", OURS / "resilio-launch", ("--no-intercept",)),  # calls are not noted
    Launcher("torchrun", "defaults", PEERS / "torchrun", STANDALONE),
    Launcher("torchrun", "best", PEERS / "torchrun", (*STANDALONE, "--monitor-interval=0.1"), OWN_STORE),
    Launcher("ft_launcher", "defaults", PEERS / "ft_launcher", FAULT_TOLERANCE),
    Launcher(
        "ft_launcher",
        "best",
        PEERS / "ft_launcher",
        (*FAULT_TOLERANCE, "--monitor-interval=0.1", "--ft-workload-check-interval=0.1", "--workers-stop-timeout=1"),
        OWN_STORE,
    ),
    Launcher("dlrover-run", "defaults", PEERS / "dlrover-run", STANDALONE, DLROVER_ADDRESS, DLROVER_MASTER),
    Launcher(
        "dlrover-run",
        "best",
        PEERS / "dlrover-run",
        (*STANDALONE, "--monitor-interval=0.1"),
        OWN_STORE | DLROVER_ADDRESS,
        DLROVER_MASTER,
    ),
)
