"""The command line: ``compare``, ``explain`` and ``profiles``, and the targets they work on."""
