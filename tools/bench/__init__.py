"""The benchmark: workloads, each measured in a process of its own, and their result files."""
