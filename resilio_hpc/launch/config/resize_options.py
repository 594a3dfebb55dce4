"""More nodes and fewer while a run trains, by joiner jobs (docs/resizing.md): part of its options."""

from __future__ import annotations

from dataclasses import dataclass

from resilio_hpc.launch.config.flags import run_flag


@dataclass(frozen=True)
class ResizeOptions:
    """Whether the launcher keeps ``resilio resize`` running, and with which words."""

    resize: bool = run_flag(
        "add idle nodes to the run while no other job wants them, and give them back, by jobs of their own (needs "
        "--nnodes MIN:MAX)",
        False,
        None,
    )
    resize_policy: str = run_flag(
        "with --resize: a TOML file with numbers of one's own for when it does",
        "",
        raw=None,
        reads=None,
        metavar="FILE",
    )
    resize_options: tuple[str, ...] = run_flag(
        "with --resize: options of resilio resize, in one word: '--max-nodes 16 --model gpt3-175b --global-batch 512'",
        (),
        raw=None,
        reads=None,
        metavar="WORDS",
    )
