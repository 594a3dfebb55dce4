"""Where the output of a run is shown: part of its options."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.launch.config.flags import comma_separated, output_flag


@dataclass(frozen=True)
class OutputOptions:
    """What of the ranks' output is shown where, besides their log files."""

    view: bool = output_flag("live view of the run instead of the ranks' output", False, None)
    log_dir: str = output_flag(
        "the ranks' log files (default: RUN_DIR/logs)", "", raw=None, reads=None, metavar="DIR", pet=True
    )
    redirects: str = output_flag(  # see launch/config/streams.py
        "streams that go to the log files only: 0 none, 1 stdout, 2 stderr, 3 both, or LOCAL_RANK:VALUE,…",
        "0",
        metavar="STD",
        pet=True,
        names="-r --redirects",
    )
    tee: str = output_flag(
        "streams that also go to the console (same notation)", "0", metavar="STD", pet=True, names="-t --tee"
    )
    local_ranks_filter: tuple[int, ...] = output_flag(
        "show only these local ranks: 0,1", (), raw="", reads=None, metavar="RANKS", pet=True
    )
    duplicate_stdout_filters: tuple[str, ...] = output_flag(
        "copy stdout lines that hold one of these words to filtered_stdout.log",
        (),
        comma_separated,
        raw=[],
        reads=tuple,
        metavar="WORDS",
        pet=True,
    )
    duplicate_stderr_filters: tuple[str, ...] = output_flag(
        "the same for stderr", (), comma_separated, raw=[], reads=tuple, metavar="WORDS", pet=True
    )
    log_line_prefix_template: str = ""
