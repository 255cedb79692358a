"""One recording: making it, replaying it, and its outputs."""
