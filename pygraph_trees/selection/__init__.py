"""Selection: which functions run as CUDA graphs.

``functions`` decides before a program is compiled and when its graphs are put to use; ``trial`` measures; ``profiles``
keeps decisions on disk. README.md explains the cost model, the trials and the profiles.
"""
