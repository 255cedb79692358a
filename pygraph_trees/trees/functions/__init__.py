"""One compiled function: its settings, log, calls and threads, and what follows from errors."""
