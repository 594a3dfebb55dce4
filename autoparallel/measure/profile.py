"""What was measured of a cluster: collectives and operators. Pure; ``profile_file`` reads and writes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.autoparallel.measure.comm_fit import Curve
from resilio_hpc.autoparallel.measure.compute_samples import Sample


@dataclass(frozen=True)
class Profile:
    """What a file holds; without a part its ``about`` is empty."""

    curves: tuple[Curve, ...] = ()
    about_communication: Mapping[str, str] | None = None
    samples: tuple[Sample, ...] = ()
    about_compute: Mapping[str, str] | None = None

    def curve(self, collective: str, span: str) -> Curve | None:
        """Return the curve of a collective over a span, if it was measured."""
        return next((one for one in self.curves if (one.collective, one.span) == (collective, span)), None)
