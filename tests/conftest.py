"""For all tests."""

from __future__ import annotations

import signal

# A shell starts what runs in its background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
