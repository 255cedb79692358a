"""Random programs, and checks that a compiled program does what eager does.

A :class:`~fuzzing.case.Case` is a small program with its inputs and the events around its calls, as plain data and
readable Python. ``programs`` draws cases from ``operations`` and ``constants``, ``memory`` lays out their inputs,
``runner`` calls a case in one way, with ``faults`` and with calls ``beside`` it, ``check`` compares several ways,
``campaign`` does that for a given time in processes of their own, and ``reduction`` makes a failing case smaller.
"""
