from collections.abc import Sequence

from typing_extensions import Buffer

def write(
    fd: int,
    memory: Buffer,
    pieces: Sequence[tuple[int, int, int]],
    blocks: Sequence[tuple[int, int, int]],
    depth: int,
    chunk_bytes: int,
    bytes_per_s: float,
    concurrent: bool,
    /,
) -> int: ...
def read(
    fd: int, segments: Sequence[tuple[int, Buffer, int]], depth: int, chunk_bytes: int, concurrent: bool, /
) -> list[int]: ...
def read_cached(fd: int, segments: Sequence[tuple[int, Buffer, int]], chunk_bytes: int, /) -> list[int]: ...
def is_concurrent() -> bool: ...
