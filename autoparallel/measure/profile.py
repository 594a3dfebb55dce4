"""The measurements of a cluster: collectives and operators. Pure; ``profile_file`` reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resilio_hpc.autoparallel.measure.comm_fit import Curve
from resilio_hpc.autoparallel.measure.compute_samples import Sample


@dataclass(frozen=True)
class Profile:
    """The content of a file; a missing part has an empty ``about``."""

    curves: tuple[Curve, ...] = ()
    about_communication: Mapping[str, str] | None = None
    samples: tuple[Sample, ...] = ()
    about_compute: Mapping[str, str] | None = None

    def curve(self, collective: str, span: str) -> Curve | None:
        """Return the curve of a collective over a span, if it was measured."""
        return next((one for one in self.curves if (one.collective, one.span) == (collective, span)), None)
