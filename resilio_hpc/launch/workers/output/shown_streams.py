"""Which streams of a rank are shown on the console, as the user's options say, and how their lines begin. Pure."""

from __future__ import annotations

from string import Template

from msgspec import Struct

from resilio_hpc.launch.config.options import LaunchOptions
from resilio_hpc.launch.config.streams import Std, parse_std, std_of


class Shown(Struct, frozen=True):
    """Where one stream of one rank is shown, besides its log file."""

    on_console: bool
    words: tuple[bytes, ...]  # a line that holds one of these words is duplicated
    prefix: bytes


def shown(options: LaunchOptions, local_rank: int, rank: int, world_size: int, stream: Std) -> Shown:
    """Return where a stream is shown. Pure.

    These are torchrun's rules: a teed stream is shown, a redirected one is not, the filter holds for both. Without
    ``--tee`` everything that is not redirected is shown, and lines that hold a filter's word are duplicated. Beside a
    live view, nothing is shown.
    """
    teed = bool(std_of(options.output.tee, local_rank) & stream)
    redirected = bool(std_of(options.output.redirects, local_rank) & stream)
    wanted = not options.output.local_ranks_filter or local_rank in options.output.local_ranks_filter
    words = options.output.duplicate_stdout_filters if stream == Std.OUT else options.output.duplicate_stderr_filters
    duplicated = wanted and (teed or parse_std(options.output.tee) == Std.NONE)
    return Shown(
        on_console=wanted and not options.output.view and (teed or not redirected),
        words=tuple(word.encode() for word in words) if duplicated else (),
        prefix=_prefix(options, local_rank, rank, world_size, teed).encode(errors="replace"),
    )


def folds_echoes(options: LaunchOptions) -> bool:
    """Return whether tracebacks of echoes are kept off the console: not where the user has chosen what is shown. Pure.

    Torchrun's ``--tee`` and ``--local-ranks-filter`` name streams that are shown whole.
    """
    return (
        options.echoes == "fold" and parse_std(options.output.tee) == Std.NONE and not options.output.local_ranks_filter
    )


def _prefix(options: LaunchOptions, local_rank: int, rank: int, world_size: int, teed: bool) -> str:
    if options.output.log_line_prefix_template:
        return Template(options.output.log_line_prefix_template).safe_substitute(
            role_name=options.role, rank=rank, local_rank=local_rank
        )
    if teed:
        return f"[{options.role}{local_rank}]:"
    return f"[rank {rank}] " if world_size > 1 else ""
