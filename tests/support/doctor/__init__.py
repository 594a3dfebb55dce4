"""Help for tests of ``resilio doctor``: machines on which something is broken on purpose."""
