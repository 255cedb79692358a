"""The command line: ``compare``, ``explain`` and ``profiles``, and the program that a command is given."""
