"""The table route: slots that hold addresses, and variants of Triton kernels that load pointers from them.

``launches`` notes and redirects launches of Inductor's kernels, ``variants`` rewrites a kernel, ``pointer_table`` holds
the slots, and ``builds`` makes all that a function needs, with the help of another process.
"""
