"""From a verdict to a drain in Slurm and back, and to the record of faults.

It uses ``run`` and ``base``, and Slurm through ``slurm.drain`` and ``slurm.node_faults``. Start reading at
``node_drains``.
"""
