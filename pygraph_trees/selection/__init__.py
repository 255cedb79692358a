"""Selection: which functions run as CUDA graphs; README.md explains the cost model, the trials and the profiles."""
