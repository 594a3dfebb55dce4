"""Pipeline schedules: the time of an iteration from the times of its stages."""

from __future__ import annotations

import numpy as np

from resilio_hpc.autoparallel.layout import Column


def pipeline_time(slowest: Column, total: Column, micro_batches: Column, vpp: Column, zero_bubble: Column) -> Column:
    """Seconds of 1F1B or GPipe: the slowest stage without a pause, and filling and draining through the others.

    ``slowest``: seconds of one micro-batch on the slowest stage, forward and backward; ``total``: over all stages.
    Interleaving (vpp chunks per stage) divides the bubble by vpp (arXiv:2104.04473, 2.2); ZB-H1 leaves a third of it
    (arXiv:2401.10241). With equal stages this is formula (3) of the Resilio paper without its transfers.
    """
    bubble = (total - slowest) / np.maximum(vpp, 1) * np.where(zero_bubble > 0, 1 / 3, 1.0)
    return micro_batches * slowest + bubble
