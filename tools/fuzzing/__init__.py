"""Random programs, and whether a compiled one does what eager does.

A :class:`~fuzzing.case.Case` is a small program with its inputs, as plain data and readable Python. ``strategies``
draws cases from ``operations``, ``memory`` lays their inputs out, ``check`` runs a case in several ways and compares,
``campaign`` does that for a given time in processes of their own, and ``reduction`` makes a failing case small.
"""
