"""What lines of logs mean, and which of them names the cause (RES-3, OPS-5).

Begin with `judge.judge`: streams of lines come in, a `LikelyCause` comes out. `pattern_table` holds patterns.toml,
which `pattern_index` searches. `log_line` removes prefixes and conditional language from a line. `log_files` reads the
ends of files, `cases` JSON lines. Uses ``core`` only.
"""
