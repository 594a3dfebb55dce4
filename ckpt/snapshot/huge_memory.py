"""Files in shared memory with every page present, in huge pages where the kernel has them."""

from __future__ import annotations

import os

from resilio_hpc.ckpt.format.pages import HUGE_PAGE, PAGE
from resilio_hpc.native import make_huge


def mount_has_huge_pages(fd: int) -> bool:
    """Return whether the mount gives this file huge pages by itself (``huge=always``, ``huge=within_size``)."""
    return os.fstat(fd).st_blksize > PAGE


def allocate(fd: int, memory: memoryview, begin: int, end: int, in_huge_pages: bool = True) -> bool:
    """Allocate the bytes from ``begin`` to ``end``; return whether all are in huge pages.

    Pages that begin the range of a huge one are excepted. ``memory``: the file from its begin, by ``map_shared``. From
    Linux 6.1 on, the kernel gathers a huge page around a page that is there. Raises OSError (ENOSPC).
    """
    if in_huge_pages and not mount_has_huge_pages(fd):
        for huge_page in range(begin, end, HUGE_PAGE):
            os.posix_fallocate(fd, huge_page, min(PAGE, end - huge_page))
        in_huge_pages = make_huge(memory[begin:end])
    os.posix_fallocate(fd, begin, end - begin)
    return in_huge_pages
