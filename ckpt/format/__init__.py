"""The bytes of a step: manifest, shard files, checksums, and reading and writing them past the page cache.

Start reading at ``manifest``.
"""
