"""State on devices: one interface, the CPU's and CUDA's implementations, and a slot for those of third parties.

Start reading at ``interface``; ``registry`` finds the device of a tensor. ``command_log`` rebuilds what cannot be
dumped, and the ``process_*`` modules are a device that uses it.
"""
