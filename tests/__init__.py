"""The tests; what they share is in tests.support."""
