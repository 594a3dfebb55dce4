"""Programs of the tests of core."""
