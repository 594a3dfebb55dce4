"""The values of pair_policy.toml, or of a site's own file. Pure, except for reading the file."""

from __future__ import annotations

from pathlib import Path

import msgspec

from resilio_hpc.core.compat import tomllib
from resilio_hpc.core.errors import UsageError

_DEFAULTS = Path(__file__).with_name("pair_policy.toml")


class PairPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The values; pair_policy.toml has their meanings. Matrices are square: rows; all times are seconds."""

    cpu_matrix: int
    gpu_matrix: int
    cpu_message_bytes: int
    gpu_message_bytes: int
    blocks: int
    block_s: float
    messages_per_block: int
    start_s: float
    compute_s: float
    collective_s: float
    silence_s: float
    budget_s: float
    slow_compute: float
    slow_collective: float
    slow_deviations: float
    least_difference_s: float
    slow_share: float
    rounds: int

    def __post_init__(self) -> None:
        low = [name for name in self.__struct_fields__ if not getattr(self, name) > 0]
        if low:
            raise ValueError(f"{low[0]} must be above 0, not {getattr(self, low[0]):g}")
        if self.slow_compute <= 1 or self.slow_collective <= 1:
            raise ValueError("slow_compute and slow_collective are ratios above 1")
        if self.slow_share > 0.5:
            raise ValueError("slow_share is at most 0.5: the median has to be that of healthy nodes")
        if max(self.cpu_matrix, self.gpu_matrix) > MAX_MATRIX:
            raise ValueError(f"a matrix has at most {MAX_MATRIX} rows: sums must stay exact")


MAX_MATRIX = 65536  # rows of numbers from -2 to 2: products below 2^18


def pair_policy(file: Path | None = None) -> PairPolicy:
    """Return the defaults, overridden by ``file``. Raises UsageError."""
    values = tomllib.loads(_DEFAULTS.read_text())
    try:
        if file is not None:
            values |= tomllib.loads(file.read_text())
        return msgspec.convert(values, PairPolicy)
    except (OSError, UnicodeError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"{file}: not a policy of the pair check: {error}") from error


class CheckRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``nodes`` in the allocation's order: neighbours are paired first.

    ``place``: "local" (this machine plays them), "step" (one srun step in the job ``job``), or "srun" (an srun with an
    allocation of its own). ``address``: of this machine, for the nodes.
    """

    nodes: tuple[str, ...]
    place: str
    policy: PairPolicy
    address: str = "127.0.0.1"
    job: str = ""
    cpus: int = 0  # per task, which Slurm would otherwise bind to one
    srun_options: tuple[str, ...] = ()
