"""``resilio plan --submit`` as a command on the dev cluster, for rankings that a test writes down. (No test.)"""

from __future__ import annotations

import argparse
import sys

from resilio_hpc.autoparallel.choice import Choice, Offer
from resilio_hpc.autoparallel.layout import Layout
from resilio_hpc.autoparallel.shapes import Shape
from resilio_hpc.cli.plan_submit import add_options, submit
from resilio_hpc.core.errors import ResilioError


def ranking(sizes: str) -> list[Choice]:
    """``3x2,2x2,1x2``: nodes and GPUs of each, tp over the GPUs of a node."""
    choices = []
    for nodes, gpus in (map(int, size.split("x")) for size in sizes.split(",")):
        layout = Layout(tp=gpus, dp=nodes, micro_batch=2, global_batch=12)
        offer = Offer(Shape(nodes, gpus), "main", "")
        choices.append(Choice(offer, layout, 1.0, 0.9, 1.1, 0.4, 0.0, 0.1, 1e9, 2e9))
    return choices


if __name__ == "__main__":
    words = sys.argv[1:]
    at = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--json", action="store_true")
    add_options(parser)
    options = parser.parse_args(words[:at])
    try:
        sys.exit(submit(ranking(options.sizes), options, words[at + 1 :]))
    except ResilioError as error:
        sys.exit(f"resilio: error: {error}")
