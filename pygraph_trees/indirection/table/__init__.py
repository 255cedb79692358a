"""The table route: slots that hold addresses, and variants of Triton kernels that load pointers from them.

``launches`` notes and redirects launches of Inductor's kernels, ``variants`` rewrites a kernel, ``variant_launchers``
launches it, ``builds`` loads all that a function needs, ``worker`` compiles in another process, and ``pointer_table``
holds the slots.
"""
