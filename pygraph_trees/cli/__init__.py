"""The command line: ``compare``, ``explain``, ``doctor`` and ``profiles``, and the targets they work on.

``python -m pygraph_trees`` parses arguments and calls these modules. They build the target program, check output files
and show progress. A usage error raises a :class:`PygraphError`.
"""
