"""What tests of reports share: run directories of long runs."""
