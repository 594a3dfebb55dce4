"""The one list of metrics. Exposition, files and docs/metrics.md are made from it; a sample outside of it is refused.

Labels are few: a rank, a GPU, a device, and the operation of a call. ``run`` and ``node`` are the same for all series
of an exporter. A counter only grows while its source lives; what has no value is left out, and is never 0.
"""

from __future__ import annotations

from typing import NamedTuple

PREFIX = "resilio_"
COUNTER, GAUGE = "counter", "gauge"
ALWAYS = ("run", "node")
"""Labels of every series."""


class Metric(NamedTuple):
    """One row. ``name`` without the prefix; its end names the unit, and ``_total`` a counter."""

    name: str
    labels: tuple[str, ...]
    source: str
    help: str

    @property
    def kind(self) -> str:
        """Return whether it is a counter or a gauge."""
        return COUNTER if self.name.endswith("_total") else GAUGE

    @property
    def unit(self) -> str:
        """Return the unit, as Prometheus names units; "" for a number."""
        last = self.name.removesuffix("_total").rpartition("_")[2]
        return last if last in _UNITS else ""

    @property
    def full_name(self) -> str:
        """Return the name with its prefix."""
        return PREFIX + self.name


_UNITS = ("bytes", "seconds", "ratio", "celsius", "watts", "hertz")
_R, _G, _D = ("rank",), ("gpu",), ("device",)
_STAT, _NVML = "/proc/stat", "NVML"
_DISKS, _NET, _IB = "/proc/diskstats", "/proc/net/dev", "/sys/class/infiniband"
_RING = "call ring"
_CHECK = "resilio check"

_TABLE: dict[str, tuple[Metric, ...]] = {
    "host": (
        Metric("host_cpu_used_ratio", (), _STAT, "processor time in use since the sample before, all processors"),
        Metric("host_cpu_iowait_ratio", (), _STAT, "processor time in which a process waited for a disk"),
        Metric("host_processors", (), "sched_getaffinity(2)", "processors that the agent may use"),
        Metric("host_load1", (), "/proc/loadavg", "load average of one minute"),
        Metric("host_memory_total_bytes", (), "/proc/meminfo", "main memory"),
        Metric("host_memory_available_bytes", (), "/proc/meminfo", "memory that processes can get without swapping"),
        Metric("host_memory_shared_bytes", (), "/proc/meminfo", "shared memory, /dev/shm included"),
        Metric("host_swap_used_bytes", (), "/proc/meminfo", "swap in use"),
        Metric("host_oom_kills_total", (), "/proc/vmstat", "processes that the kernel killed for lack of memory"),
        Metric("host_cpu_waiting_seconds_total", (), "/proc/pressure", "time in which a process waited for a CPU"),
        Metric("host_memory_waiting_seconds_total", (), "/proc/pressure", "time in which a process waited for memory"),
        Metric("host_memory_stalled_seconds_total", (), "/proc/pressure", "time in which all waited for memory"),
        Metric("host_io_waiting_seconds_total", (), "/proc/pressure", "time in which a process waited for a disk"),
        Metric("job_memory_limit_bytes", (), "cgroup", "the memory limit of the job's cgroup that is reached first"),
        Metric("job_memory_used_bytes", (), "cgroup", "memory below that limit, without what the kernel can drop"),
        Metric("job_oom_kills_total", (), "cgroup", "processes of the job that the kernel killed for lack of memory"),
        Metric("memory_level", _D, "memory watch", "0: as usual, 1: warning, 2: critical; of host, job, gpu N, rank N"),
        Metric("memory_full_in_seconds", _D, "memory watch", "when memory is full if its use grows on as it does"),
    ),
    "storage": (
        Metric("storage_size_bytes", _D, "statvfs(3)", "size of the file system of run_dir, local (/tmp) and shm"),
        Metric("storage_free_bytes", _D, "statvfs(3)", "free space for the user"),
        Metric("storage_free_inodes", _D, "statvfs(3)", "files that can still be made"),
        Metric("disk_read_bytes_total", _D, _DISKS, "read from the disk of one of these file systems"),
        Metric("disk_written_bytes_total", _D, _DISKS, "written to it"),
        Metric("disk_reads_total", _D, _DISKS, "completed reads"),
        Metric("disk_writes_total", _D, _DISKS, "completed writes"),
        Metric("disk_read_seconds_total", _D, _DISKS, "time of all reads: over disk_reads_total, their latency"),
        Metric("disk_write_seconds_total", _D, _DISKS, "time of all writes"),
        Metric("disk_busy_seconds_total", _D, _DISKS, "time in which the disk had something to do"),
    ),
    "network": (
        Metric("network_received_bytes_total", _D, _NET, "received by an interface"),
        Metric("network_sent_bytes_total", _D, _NET, "sent by an interface"),
        Metric("network_receive_errors_total", _D, _NET, "packets received with an error"),
        Metric("network_send_errors_total", _D, _NET, "packets that could not be sent"),
        Metric("network_receive_drops_total", _D, _NET, "packets dropped on arrival"),
        Metric("network_send_drops_total", _D, _NET, "packets dropped before they were sent"),
        Metric("tcp_sent_segments_total", (), "/proc/net/snmp", "TCP segments sent"),
        Metric("tcp_retransmitted_segments_total", (), "/proc/net/snmp", "TCP segments sent again"),
        Metric("infiniband_received_bytes_total", _D, _IB, "received by a port, such as mlx5_0/1"),
        Metric("infiniband_sent_bytes_total", _D, _IB, "sent by a port"),
        Metric("infiniband_active", _D, _IB, "1: the port is ACTIVE"),
        Metric("infiniband_link_downs_total", _D, _IB, "how often the link went down (link_downed)"),
        Metric("infiniband_link_recoveries_total", _D, _IB, "how often it recovered (link_error_recovery)"),
        Metric("infiniband_symbol_errors_total", _D, _IB, "symbol errors"),
        Metric("infiniband_receive_errors_total", _D, _IB, "packets received with an error (port_rcv_errors)"),
        Metric("infiniband_send_discards_total", _D, _IB, "packets not sent (port_xmit_discards)"),
        Metric("infiniband_send_waits_total", _D, _IB, "ticks in which data waited to be sent (port_xmit_wait)"),
        Metric("infiniband_integrity_errors_total", _D, _IB, "local_link_integrity_errors"),
        Metric("infiniband_overruns_total", _D, _IB, "excessive_buffer_overrun_errors"),
        Metric("infiniband_out_of_sequence_total", _D, _IB, "packets out of sequence"),
        Metric("infiniband_timeouts_total", _D, _IB, "retransmissions after a timeout (local_ack_timeout_err)"),
    ),
    "gpu": (
        Metric("gpu_lost", _G, _NVML, "1: the driver has lost the GPU, or wants a reset"),
        Metric("gpu_utilization_ratio", _G, _NVML, "time in which a kernel ran, over the driver's last interval"),
        Metric("gpu_memory_used_bytes", _G, _NVML, "memory in use"),
        Metric("gpu_memory_total_bytes", _G, _NVML, "memory"),
        Metric("gpu_temperature_celsius", _G, _NVML, "temperature"),
        Metric("gpu_power_watts", _G, _NVML, "power drawn"),
        Metric("gpu_sm_clock_hertz", _G, _NVML, "clock of the processors"),
        Metric("gpu_memory_clock_hertz", _G, _NVML, "clock of the memory"),
        Metric("gpu_throttle_reasons", _G, _NVML, "bits of nvmlClocksEventReasons; 0: full speed"),
        Metric("gpu_ecc_uncorrected_total", _G, _NVML, "errors that ECC found, since the driver was loaded"),
        Metric("gpu_ecc_corrected_total", _G, _NVML, "errors that ECC corrected, since the driver was loaded"),
        Metric("gpu_remap_pending", _G, _NVML, "1: a row of memory is remapped at the next reset"),
        Metric("gpu_pcie_replays_total", _G, _NVML, "PCIe packets sent again"),
        Metric("gpu_nvlinks_active", _G, _NVML, "NVLinks that are up"),
        Metric("gpu_nvlink_errors_total", _G, _NVML, "replays, recoveries and CRC errors of all its NVLinks"),
    ),
    "ranks": (
        Metric("rank_resident_bytes", _R, "/proc/PID/statm", "memory of a rank's process, what it shares included"),
        Metric("rank_cpu_seconds_total", _R, "/proc/PID/stat", "processor time of a rank's process"),
        Metric("rank_step", _R, "train", "steps that a rank has done; only where it reports them"),
        Metric("rank_step_seconds", _R, "train", "time of its last step"),
    ),
    "collectives": (
        Metric("rank_calls_begun_total", _R, _RING, "calls of communication libraries begun"),
        Metric("rank_calls_completed_total", _R, _RING, "of those, calls seen to complete"),
        Metric("rank_op_calls_total", (*_R, "op"), _RING, "calls by operation; beyond 2048 in a sample, an estimate"),
        Metric("rank_op_bytes_total", (*_R, "op"), _RING, "bytes that these calls named, as far as they are known"),
        Metric("rank_collective_seconds_total", _R, _RING, "time in which some call was under way; not with NCCL"),
    ),
    "run": (
        Metric("run_phase", (), "controller", "0 gathering, 1 preparing, 2 starting, 3 running, 4 ended"),
        Metric("run_round", (), "agent", "round of the ranks on this node"),
        Metric("run_restarts", (), "controller", "restarts so far"),
        Metric("run_ranks", (), "controller", "ranks in the round"),
        Metric("run_nodes", (), "controller", "nodes whose agent is here"),
        Metric("run_nodes_lost", (), "controller", "nodes that are lost"),
        Metric("run_committed_step", (), "controller", "newest committed step"),
        Metric("run_step", (), "controller", "fewest steps of any node that trains"),
        Metric("run_stalled_seconds", (), "controller", "time without a step where that is too long; 0: steps go on"),
        Metric("run_progress_age_seconds", (), "controller", "time since the step, or the committed one, changed"),
        Metric("run_save_seconds", (), "controller", "time that the newest save took, until it was durable"),
        Metric("run_restarts_left", (), "controller", "restarts without progress that --max-restarts still allows"),
        Metric("run_led_seconds_total", (), "controller", "time since this node leads the run"),
        Metric("run_stepping_seconds_total", (), "controller", "of that, time in which ranks ran and did not stall"),
    ),
    "check": (
        Metric("check_timestamp_seconds", (), _CHECK, "Unix time of the check"),
        Metric("check_active", (), _CHECK, "1: a job of the run runs, or is to follow; 0: the run is over"),
        Metric("check_goodput_ratio", (), _CHECK, "useful time / total time, over all jobs of the run"),
        Metric("check_alive_ratio", (), _CHECK, "of the last five minutes, the share in which all ranks lived"),
        Metric("check_save_seconds", (), _CHECK, "time that the newest save took, or has taken so far"),
        Metric("check_load_seconds", (), _CHECK, "time that the slowest rank took for the newest restore"),
        Metric("check_progress_age_seconds", (), _CHECK, "time since progress was last seen"),
        Metric("check_failures", (), _CHECK, "failures within the last hour"),
        Metric("check_restarts_left", (), _CHECK, "restarts without progress that --max-restarts still allows"),
        Metric("check_jobs_left", (), _CHECK, "jobs that the chain may still have"),
        Metric("check_alert", ("alert", "severity"), _CHECK, "1: the alert fires; 0: it does not"),
    ),
    "sampler": (
        Metric("sample_timestamp_seconds", (), "sampler", "Unix time of the sample"),
        Metric("sample_interval_seconds", (), "--metrics-interval", "time between two samples"),
        Metric("sampler_cpu_seconds_total", (), "sampler", "processor time of the sampling process"),
        Metric("source_stuck", _D, "sampler", "1: this source did not answer within two seconds"),
    ),
}  # fmt: skip

PARTS = {part: tuple(row.name for row in rows) for part, rows in _TABLE.items()}
METRICS = {row.name: row for rows in _TABLE.values() for row in rows}
ERRORS = tuple(
    name for name in METRICS
    if name.endswith("_total") and any(
        word in name for word in (
            "error", "drop", "discard", "retransmitted", "down", "recover", "overrun", "sequence", "timeout", "ecc",
            "replay", "oom_kills",
        )
    )
)  # fmt: skip
"""Counters whose growth in a round says something about a failure."""


def markdown() -> str:
    """Return the table of docs/metrics.md."""
    lines = ["| Metric | Type | Unit | Labels | Source | What |", "|---|---|---|---|---|---|"]
    for row in METRICS.values():
        cells = (f"`{row.full_name}`", row.kind, row.unit, ", ".join(row.labels), row.source, row.help)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
