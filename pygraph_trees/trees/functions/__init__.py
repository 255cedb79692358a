"""A compiled function: its settings and log, the path of its calls, and errors in them."""
