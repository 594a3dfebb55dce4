"""Whether results are right: replicas that must be equal, and steps whose values look wrong.

Begin with `replica_digests` (replicas compared part by part, between the steps) and with `step_guard` (a suspect step
done again: on this device, then on another one). `verdict` and `spikes` decide, and are pure.
"""
