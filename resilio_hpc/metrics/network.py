"""Interfaces, TCP and InfiniBand ports of a node."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import psutil

from resilio_hpc.core.errors import ResilioError
from resilio_hpc.metrics.sheet import Sheet
from resilio_hpc.prolog_epilog.base.node_files import NodeFiles, whole_number

MOST_INTERFACES = 32
_NET, _IB = "/sys/class/net", "/sys/class/infiniband"
_PORT: Mapping[str, str] = {
    "counters/link_downed": "infiniband_link_downs_total",
    "counters/link_error_recovery": "infiniband_link_recoveries_total",
    "counters/symbol_error": "infiniband_symbol_errors_total",
    "counters/port_rcv_errors": "infiniband_receive_errors_total",
    "counters/port_xmit_discards": "infiniband_send_discards_total",
    "counters/port_xmit_wait": "infiniband_send_waits_total",
    "counters/local_link_integrity_errors": "infiniband_integrity_errors_total",
    "counters/excessive_buffer_overrun_errors": "infiniband_overruns_total",
    "hw_counters/out_of_sequence": "infiniband_out_of_sequence_total",
    "hw_counters/local_ack_timeout_err": "infiniband_timeouts_total",
}
_WORDS = {"counters/port_rcv_data": "received", "counters/port_xmit_data": "sent"}
_WORD_BYTES = 4  # the specification counts data in words of four bytes


class NetworkSource:
    """Reads them. ``root``: below which sysfs and /proc/net/snmp are; psutil reads /proc/net/dev."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = NodeFiles(root)

    def read(self) -> Sheet:
        """Return a sheet."""
        sheet = Sheet()
        found = psutil.net_io_counters(pernic=True)
        for name in self._interfaces(sorted(found))[:MOST_INTERFACES]:
            one = found[name]
            sheet.put("network_received_bytes_total", one.bytes_recv, name)
            sheet.put("network_sent_bytes_total", one.bytes_sent, name)
            sheet.put("network_receive_errors_total", one.errin, name)
            sheet.put("network_send_errors_total", one.errout, name)
            sheet.put("network_receive_drops_total", one.dropin, name)
            sheet.put("network_send_drops_total", one.dropout, name)
        self._tcp(sheet)
        self._infiniband(sheet)
        return sheet

    def _interfaces(self, names: list[str]) -> list[str]:
        """Return those with hardware; where a container shows none, all but the loopback. Bridges come and go."""
        real = [name for name in names if self._files.exists(f"{_NET}/{name}/device")]
        return real or [name for name in names if name != "lo"]

    def _tcp(self, sheet: Sheet) -> None:
        try:
            lines = self._files.text("/proc/net/snmp").splitlines()
            heads, values = (line.split() for line in lines if line.startswith("Tcp:"))
            fields = dict(zip(heads, values, strict=True))
            sheet.put("tcp_sent_segments_total", int(fields["OutSegs"]))
            sheet.put("tcp_retransmitted_segments_total", int(fields["RetransSegs"]))
        except (ResilioError, ValueError, KeyError):
            return

    def _infiniband(self, sheet: Sheet) -> None:
        for device in self._names(_IB)[:MOST_INTERFACES]:
            for port in self._names(f"{_IB}/{device}/ports")[:8]:
                name, folder = f"{device}/{port}", f"{_IB}/{device}/ports/{port}"
                state = self._text(f"{folder}/state")
                sheet.put("infiniband_active", int(state.strip().endswith("ACTIVE")) if state else None, name)
                for file, direction in _WORDS.items():
                    words = self._number(f"{folder}/{file}")
                    size = None if words is None else words * _WORD_BYTES
                    sheet.put(f"infiniband_{direction}_bytes_total", size, name)
                for file, metric in _PORT.items():
                    sheet.put(metric, self._number(f"{folder}/{file}"), name)

    def _names(self, directory: str) -> list[str]:
        try:
            return self._files.names(directory)
        except ResilioError:
            return []

    def _text(self, path: str) -> str:
        try:
            return self._files.optional(path) or ""
        except ResilioError:
            return ""

    def _number(self, path: str) -> int | None:
        """Return a counter; None where the adapter lacks it ("N/A (no PMA)"), or it cannot be read."""
        text = self._text(path)
        try:
            return whole_number(text, path) if text.strip() else None
        except ResilioError:
            return None
