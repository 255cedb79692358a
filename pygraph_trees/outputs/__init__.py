"""Memory of outputs that replays write: in own memory, outside of the graph pool, or in the pool.

:mod:`.allocations` finds the storages that outputs are in, :mod:`.policy` decides which get own memory, and
:mod:`.own_memory` passes it to recordings. C++ owns the memory and uses it again while it is dead. Without the native
parts, all outputs are in the pool, as in torch. README.md has the rules.
"""
