"""The recordings of a thread: which one a call replays, when a step begins, and what is given back."""
