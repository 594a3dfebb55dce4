"""Support of the tests with real frameworks."""
