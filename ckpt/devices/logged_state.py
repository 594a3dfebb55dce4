"""Tensors of a logged device in a state: saved by their contents, and rebuilt by the log where these are not to be had.

At each boundary of a step it is a position in the log and a digest. So the successor of a killed rank has its device's
state again, although the device has gone with the rank: it does the commands again, up to the step that all go on from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from resilio_hpc.ckpt.devices.device_process import digest_of
from resilio_hpc.ckpt.devices.interface import LOGGED
from resilio_hpc.ckpt.devices.process_device import ProcessTensor
from resilio_hpc.ckpt.devices.process_session import DeviceSession
from resilio_hpc.core.errors import CorruptCheckpoint, DeviceLost


class LoggedState:
    """Named tensors of one session, whole ones: an object for a state, with state_dict and load_state_dict."""

    def __init__(self, session: DeviceSession, tensors: Mapping[str, ProcessTensor]) -> None:
        self._session, self._tensors = session, dict(tensors)
        self.source = ""
        """What the last load took: "contents", or "log"."""

    def state_dict(self) -> dict[str, Any]:
        """Return position, digest, and the tensors. Raises DeviceLost."""
        numbers = {name: one.buffer.number for name, one in self._tensors.items()}
        position = self._session.mark()
        return {
            "position": position,
            "digest": self._session.digest(list(numbers.values())),
            "buffers": numbers,
            LOGGED: {name: self._own(one) for name, one in self._tensors.items()},
        }

    @staticmethod
    def _own(tensor: ProcessTensor) -> ProcessTensor:
        tensor.is_rebuilt = True
        return tensor

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the contents if they are those of the digest; else rebuild them from the log.

        Raises CorruptCheckpoint where neither can be: an older checkpoint may be whole. DeviceLost, LayoutMismatch.
        """
        if self._session.is_lost:
            self._session.rebuild()
        contents, digest = state[LOGGED], bytes(state["digest"])
        if contents.keys() != self._tensors.keys():
            raise CorruptCheckpoint(f"a device's state has {sorted(contents)}, and not {sorted(self._tensors)}")
        if self._digest(contents) == digest:
            self.source = "contents"
            for name, tensor in self._tensors.items():
                if contents[name] is not tensor:
                    tensor.store(contents[name])
            return
        self._rebuild(int(state["position"]), state["buffers"], digest)
        self.source = "log"

    def _digest(self, contents: Mapping[str, Any]) -> bytes:
        on_host = [
            (one.fetch() if isinstance(one, ProcessTensor) else one).contiguous().reshape(-1).view(torch.uint8)
            for one in (contents[name] for name in self._tensors)
        ]
        return digest_of([one.numpy().tobytes() for one in on_host])

    def _rebuild(self, position: int, numbers: Mapping[str, int], digest: bytes) -> None:
        session = self._session
        ways: list[Callable[[int], None]] = [session.rebuild] if session.log.reaches(position) else []
        ways += [session.rebuild_former] if session.reaches_former(position) else []
        why = "no log on this node leads to it"
        for way in ways:
            try:
                way(position)
                if session.digest([numbers[name] for name in self._tensors]) == digest:
                    self._take(numbers)
                    return
                why = "its commands, done again, lead to other contents"
            except DeviceLost as error:
                why = str(error)
        raise CorruptCheckpoint(f"a device's state at position {position} cannot be rebuilt: {why}")

    def _take(self, numbers: Mapping[str, int]) -> None:
        """Use the buffers of a log that was done again."""
        for name, tensor in self._tensors.items():
            tensor.buffer.number = int(numbers[name])
