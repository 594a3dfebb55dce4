"""What the tests share: waiting, environments, what a test needs of the machine, clusters; and one room per subject.

``waiting``, ``environments`` and ``requirements`` use nothing of the rooms. A room holds the fakes, the scripts and the
fixtures of the tests of the same name.
"""
