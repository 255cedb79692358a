"""Memory of outputs that replays write: in own memory, outside of the graph pool, or in the pool.

README.md has a table of the files, and the rules.
"""
