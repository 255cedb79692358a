"""A recording: how it is made and replayed, and its outputs."""
