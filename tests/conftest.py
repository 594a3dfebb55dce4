"""For all tests."""

from __future__ import annotations

import signal

import hypothesis

# A shell starts what runs in its background with SIGINT ignored, and so would be all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What an example may take says nothing on a machine that others use, too.
hypothesis.settings.register_profile("resilio", deadline=None)
hypothesis.settings.load_profile("resilio")
