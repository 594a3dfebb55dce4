"""What the tests share: see tests/support/__init__.py."""
