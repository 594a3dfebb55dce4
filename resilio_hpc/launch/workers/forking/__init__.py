"""The process that forks ranks (the zygote), and what it does with them. Start reading at ``zygote``."""
