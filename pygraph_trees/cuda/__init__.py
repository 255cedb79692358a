"""The CUDA driver: its calls, the nodes of captured graphs, and the extent of a tensor's memory."""
