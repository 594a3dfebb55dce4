"""The functions of the C extensions in Python, for where these could not be built: the same results, but slower."""
