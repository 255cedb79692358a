"""The CUDA driver: its calls, the nodes of captured graphs, and the memory that they read and write."""
