"""Limits on open files: an agent needs as many as the system allows, ranks keep the user's limit.

The usual soft limit of 1024 would end a controller's connections at about a thousand agents. Programs may rely on
theirs (``select`` cannot watch more than 1024), so a rank gets the limit back that it would have without the launcher.
"""

from __future__ import annotations

import errno
import resource
from collections.abc import Iterator
from contextlib import contextmanager

from resilio_hpc.core.errors import LaunchError, UsageError
from resilio_hpc.events.phrases import plural

_LEAST, _LEAST_PER_RANK = 32, 4


def check(ranks: int) -> None:
    """Raise UsageError where the hard limit is too low for an agent of so many ranks."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    needed = _LEAST + _LEAST_PER_RANK * ranks
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise UsageError(
            f"{plural(ranks, 'rank')} per node: that takes {needed} open files, and the limit is {hard}: raise it "
            "(ulimit -Hn)"
        )


@contextmanager
def limit_told() -> Iterator[None]:
    """Raise LaunchError, in one line, where this process or the machine has run out of descriptors."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        raise LaunchError(f"{error.strerror}: raise the limit, which is {hard} (ulimit -Hn)") from None


def raise_limit() -> int:
    """Raise this process's soft limit to the hard one. Return the former one, for ``give_back``."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft


def give_back(soft: int) -> None:
    """Set this process's soft limit to ``soft``, or to the hard one if that is less. The process becomes a rank."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and (soft > hard or soft == resource.RLIM_INFINITY):
        soft = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
