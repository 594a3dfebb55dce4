"""From the first sign of a fault to the first step after it: ranks that fail, hang, are slow; nodes short of memory."""
