"""Models to be planned: read from a configuration or traced, as operators and a graph.

Start reading at ``model_description`` and ``trace``.
"""
