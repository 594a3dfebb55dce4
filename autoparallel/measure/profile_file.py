"""Measured profiles of a cluster in one HDF5 file: collectives (profile-comm) and operators of a GPU (profile).

    /                            format, version
    /communication               backend, versions, device, hosts, date …
    /communication/COLLECTIVE/SPAN   latency, bus_bandwidth, size, time (medians), samples (one row per size)
    /compute                     device, versions, host, date …
    /compute/KIND                shape (one row per operator, columns named), work, time, samples

Every dataset has an attribute ``units``.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import resilio_hpc
from resilio_hpc.autoparallel.measure.comm_fit import BANDWIDTH, FACTORS, LATENCY_S, SPANS, Curve
from resilio_hpc.autoparallel.measure.compute_samples import KINDS, Sample
from resilio_hpc.autoparallel.measure.profile import Profile
from resilio_hpc.core.compat import UTC
from resilio_hpc.core.durable import write_atomic
from resilio_hpc.core.errors import UsageError, os_error_text

FORMAT, VERSION = "resilio profile", 1
LARGEST_BYTES = 64 << 20


def about(
    backend: str, version: str, device: str, hosts: Sequence[str], environment: Mapping[str, str]
) -> dict[str, str]:
    """Return the circumstances of the numbers, by which they can be judged later."""
    names = list(dict.fromkeys(hosts))
    facts = {
        "backend": backend,
        "backend_version": version,
        "device": device,
        "hosts": ",".join(names),
        "nodes": str(len(names)),
        "ranks": str(len(hosts)),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "resilio_version": resilio_hpc.__version__,
    }
    slurm = {"slurm_job": "SLURM_JOB_ID", "partition": "SLURM_JOB_PARTITION", "cluster": "SLURM_CLUSTER_NAME"}
    return facts | {name: environment[variable] for name, variable in slurm.items() if variable in environment}


def write_communication(path: Path, curves: Sequence[Curve], about: Mapping[str, str]) -> None:
    """Replace the file's collectives; its operators stay. Raises UsageError."""
    if not curves:
        raise UsageError("no collective could be measured: nothing was written")

    def fill(group: Any) -> None:
        for curve in curves:
            own = group.create_group(f"{curve.collective}/{curve.span}")
            own.attrs["ranks"], own.attrs["ranks_per_node"] = curve.ranks, curve.ranks_per_node
            own.attrs["error"] = curve.error
            _put(own, "latency", curve.latency_s, "s")
            _put(own, "bus_bandwidth", curve.bandwidth, "byte/s")
            _put(own, "size", np.array(curve.sizes, dtype=np.int64), "byte")
            _put(own, "time", np.array(curve.medians_s), "s")
            _put(own, "samples", np.array(curve.samples_s), "s")

    _replace(path, "communication", about, fill)


def write_compute(path: Path, samples: Sequence[Sample], about: Mapping[str, str]) -> None:
    """Replace the file's operators; its collectives stay. Raises UsageError."""

    def fill(group: Any) -> None:
        for kind, described in KINDS.items():
            rows = [sample for sample in samples if sample.kind == kind]
            if not rows:
                continue
            own = group.create_group(kind)
            _put(own, "shape", np.array([row.shape for row in rows], dtype=np.int64), "1")
            own["shape"].attrs["columns"] = ",".join(described.columns)
            _put(own, "work", np.array([described.work(row.shape) for row in rows]), described.units)
            _put(own, "time", np.array([row.median_s for row in rows]), "s")
            _put(own, "samples", np.array([row.samples_s for row in rows]), "s")

    _replace(path, "compute", about, fill)


def _put(group: Any, name: str, value: object, units: str) -> None:
    group.create_dataset(name, data=value).attrs["units"] = units


def _replace(path: Path, part: str, about: Mapping[str, str], fill: Callable[[Any], None]) -> None:
    """Write the file with another ``part``, whole or not at all."""
    buffer = io.BytesIO(_bytes(path) if path.exists() else b"")
    try:
        with h5py.File(buffer, "a" if path.exists() else "w") as file:
            if path.exists():
                _check(file, path)
            file.attrs["format"], file.attrs["version"] = FORMAT, VERSION
            if part in file:
                del file[part]
            group = file.create_group(part)
            group.attrs.update(about)
            fill(group)
        write_atomic(path, buffer.getvalue())
    except OSError as error:
        raise UsageError(f"profile: {os_error_text(error, str(path))}") from None


def read(path: Path) -> Profile:
    """Read a profile. Raises UsageError for an invalid file, or an impossible number."""
    try:
        with h5py.File(io.BytesIO(_bytes(path)), "r") as file:
            _check(file, path)
            curves = tuple(
                _curve(file[f"communication/{collective}/{span}"], collective, span)
                for collective in FACTORS
                for span in SPANS
                if f"communication/{collective}/{span}" in file
            )
            samples = tuple(
                Sample(kind, tuple(map(int, shape)), tuple(map(float, times)))
                for kind in KINDS
                if f"compute/{kind}" in file
                for shape, times in zip(
                    file[f"compute/{kind}/shape"][()], file[f"compute/{kind}/samples"][()], strict=True
                )
            )
            found = [_about(file, part) for part in ("communication", "compute")]
    except (OSError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"{path} is no profile, or a damaged one: {error}") from None
    return Profile(curves, found[0], samples, found[1])


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(LARGEST_BYTES + 1)
    except OSError as error:
        raise UsageError(f"profile: {os_error_text(error, str(path))}") from None
    if len(data) > LARGEST_BYTES:
        raise UsageError(f"{path} is larger than {LARGEST_BYTES >> 20} MiB: that is no profile")
    return data


def _check(file: Any, path: Path) -> None:
    if file.attrs.get("format") != FORMAT:
        raise UsageError(f"{path} is an HDF5 file, but no profile: resilio plan profile-comm writes one")
    if int(file.attrs.get("version", 0)) != VERSION:
        raise UsageError(
            f"{path} has version {file.attrs.get('version')} of the format, this is {VERSION}: measure again"
        )


def _about(file: Any, part: str) -> dict[str, str] | None:
    return {str(name): str(value) for name, value in file[part].attrs.items()} if part in file else None


def _curve(group: Any, collective: str, span: str) -> Curve:
    latency, bandwidth = float(group["latency"][()]), float(group["bus_bandwidth"][()])
    ranks, per_node = int(group.attrs["ranks"]), int(group.attrs["ranks_per_node"])
    plausible = LATENCY_S[0] <= latency <= LATENCY_S[1] and BANDWIDTH[0] <= bandwidth <= BANDWIDTH[1]
    if not plausible or not 1 <= per_node <= ranks < 1 << 24:
        raise UsageError(
            f"{collective}/{span}: {latency:g} s and {bandwidth:g} bytes/s over {ranks} ranks are not plausible"
        )
    return Curve(
        collective, span, ranks, per_node, latency, bandwidth, float(group.attrs["error"]),
        tuple(map(int, group["size"][()])), tuple(tuple(map(float, row)) for row in group["samples"][()]),
    )  # fmt: skip
