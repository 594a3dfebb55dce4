"""Why a layout takes what it takes, in words and pictures.

Start reading at ``explain``.
"""
