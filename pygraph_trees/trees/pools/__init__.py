"""Graph pools, the tensors that are alive in them, and locks and pauses during capture."""
