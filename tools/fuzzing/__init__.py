"""Random programs, and whether a compiled one does what eager does.

A :class:`~fuzzing.case.Case` is a small program with its inputs and with what happens around its calls, as plain data
and readable Python. ``strategies`` draws cases from ``operations`` and ``constants``, ``memory`` lays their inputs out,
``runner`` calls a case in one way, ``check`` runs it in several ways and compares, ``campaign`` does that for a given
time in processes of their own, and ``reduction`` makes a failing case small.
"""
