"""Sizes of memory pages, in bytes."""

from __future__ import annotations

PAGE = 4096
HUGE_PAGE = 2 << 20
