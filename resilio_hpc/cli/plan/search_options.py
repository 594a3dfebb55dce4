"""Options of ``resilio plan``'s searches: model and software, cluster and layouts, the run."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from resilio_hpc.autoparallel.base.layout import Offload, Recompute

PINS = ("tp", "pp", "ep", "etp", "micro_batch", "vpp")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add options for model, batch and software."""
    parser.add_argument("--megatron", metavar="ARGUMENTS", help="Megatron's arguments, quoted, in place of MODEL")
    parser.add_argument("--module", metavar="FILE.py:NAME",
                        help="a function that makes a torch module and its inputs, in place of MODEL")  # fmt: skip
    parser.add_argument("--seq", type=int, default=0, metavar="N", help="tokens of a sequence (the model's own)")
    parser.add_argument("--global-batch", type=int, default=0, metavar="N", help="sequences of an iteration (needed)")
    parser.add_argument("--framework", metavar="NAME",
                        help="Megatron-Core (default), torchtitan, DeepSpeed, FSDP, NeMo, PyTorch, any")  # fmt: skip
    parser.add_argument("--precision", default="", metavar="NAME",
                        help="bf16 (default; V100: fp16), fp16, fp8, mxfp8, nvfp4, fp32")  # fmt: skip
    parser.add_argument("--interconnect", default="", metavar="RATE", help="of a node: 8x400Gb/s, 400Gb/s per GPU")
    parser.add_argument("--calibration", type=Path, metavar="FILE.toml", help="of resilio plan calibrate")
    parser.add_argument("--profile", type=Path, metavar="FILE.h5", help="of resilio plan profile-comm and profile")


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add options for the source of GPUs, and for the layouts to look at."""
    parser.add_argument("--gpus", default="", metavar="N|A-B", help="GPUs, or a range where the run may be resized")
    parser.add_argument("--gpu", default="", metavar="TYPE", help="h100, a100-40gb, …; alone: no cluster is asked")
    parser.add_argument("--per-node", type=int, metavar="N",
                        help="GPUs of a node, with --gpu alone (the usual machine's: 8, GB200 4)")  # fmt: skip
    parser.add_argument("--partition", default="", metavar="P[,P]", help="ask Slurm, for these partitions")
    parser.add_argument("--inventory", type=Path, metavar="FILE", help="JSON or TOML in place of Slurm's answer")
    parser.add_argument("--headroom", default="5%", metavar="P%", help="memory of a GPU that must stay free (5%%)")
    parser.add_argument("--cp", type=int, metavar="N", help="only layouts with this context parallel degree")
    for name in PINS:
        flag = name.replace("_", "-")
        parser.add_argument(f"--{flag}", type=int, default=0, metavar="N", help=f"only layouts with this {flag}")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="only layouts with this ZeRO stage")
    parser.add_argument("--recompute", choices=[kind.name.lower() for kind in Recompute], help="only with this kind")
    parser.add_argument("--offload", choices=[*(kind.name.lower() for kind in Offload), "any"],
                        help="only layouts with this in the host's memory (none: nothing; any: all of these, ranked "
                        "together; without it, only where nothing fits otherwise)")  # fmt: skip


def add_run(parser: argparse.ArgumentParser) -> None:
    """Add options for the length of the run and its failures."""
    parser.add_argument("--steps", type=int, default=0, metavar="N", help="iterations of the run")
    parser.add_argument("--tokens", type=float, default=0.0, metavar="N", help="or its tokens, such as 300e9")
    parser.add_argument("--mtbf", type=float, default=math.inf, metavar="HOURS",
                        help="mean time between failures of a node (default: no failures)")  # fmt: skip
    parser.add_argument("--restart-s", type=float, default=120.0, metavar="S", help="to be back after a failure (120)")
    parser.add_argument("--checkpoint-s", type=float, default=1.0, metavar="S", help="a checkpoint stalls the run (1)")
