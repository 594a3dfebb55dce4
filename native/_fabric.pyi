from typing_extensions import Buffer

def providers() -> list[tuple[str, str, str]]:
    """Return provider, fabric and domain of all that libfabric could read remote memory with. Raises OSError."""

class Endpoint:
    """Reads, or lets read, memory of other nodes. For any thread. Errors are OSError, in libfabric's words."""

    def __new__(cls, provider: str, host: str | None, /) -> Endpoint:
        """``host``: whose address this node's own is; None: the first that the provider has."""

    def address(self) -> bytes:
        """Return what leads here, for ``peer`` on the other node."""

    def register(self, memory: Buffer, is_remote: bool, key: int, /) -> tuple[int, int, int]:
        """Return its number, its key, and the address of its begin, for ``read`` on the other node.

        ``is_remote``: others may read it. ``key``: a number drawn at random, for providers that make none.
        """

    def release(self, number: int, /) -> None: ...
    def peer(self, address: bytes, /) -> int: ...
    def read(self, peer: int, number: int, offset: int, size: int, address: int, key: int, /) -> bool:
        """Begin to read into registered memory; False: not now, ``progress`` first."""

    def progress(self, seconds: float, /) -> int:
        """Return how many reads are done, 0 after that time. Raises OSError for one that failed."""

    def close(self) -> None:
        """End all reads, and then let the memory go. What another thread waits for ends."""
