"""Explanations of a layout's time, in words and pictures.

Start reading at ``explain``.
"""
