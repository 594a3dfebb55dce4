"""The commands of ``resilio``: a module each, or a room for those with many. Start reading at ``main``."""
