"""Memory of outputs: which have memory of their own, outside of the graph pool, and when it is used again."""
