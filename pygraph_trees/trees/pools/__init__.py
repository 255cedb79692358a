"""Graph pools, which tensors in them are alive, and what must not happen meanwhile."""
