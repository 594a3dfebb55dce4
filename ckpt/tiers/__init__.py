"""The nodes' own disks, as a tier before the shared file system, and disks that hang.

Start reading at ``local_disk``.
"""
