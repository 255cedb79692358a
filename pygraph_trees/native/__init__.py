"""Built in C and C++: the fast path of a replay, questions about many tensors, and the reader of graph nodes."""
