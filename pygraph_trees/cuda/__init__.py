"""The CUDA driver: its calls, the nodes of captured graphs, and the memory of tensors.

``driver`` is the only module that calls ``cuda.bindings``; it returns None if they are not installed. Failed calls
raise :class:`DriverError`. README.md states what changes must preserve.
"""
