from collections.abc import Sequence

from typing_extensions import Buffer

Segment = (
    tuple[int, Buffer, int] | tuple[int, Buffer, int, int, int, tuple[int, int, int, tuple[tuple[int, int, int], ...]]]
)

def write(
    fd: int,
    memory: Buffer,
    pieces: Sequence[tuple[int, int, int]],
    blocks: Sequence[tuple[int, int, int]],
    depth: int,
    chunk_bytes: int,
    bytes_per_s: float,
    concurrent: bool,
    stalled_s: float = 3,
    /,
) -> int: ...
def read(
    fd: int,
    segments: Sequence[Segment],
    depth: int,
    chunk_bytes: int,
    concurrent: bool,
    stalled_s: float = 3,
    /,
) -> list[int]: ...
def read_cached(fd: int, segments: Sequence[Segment], chunk_bytes: int, /) -> list[int]: ...
def copy_segments(memory: Buffer, segments: Sequence[Segment], /) -> None: ...
def is_concurrent() -> bool: ...
