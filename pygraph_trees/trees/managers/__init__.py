"""A thread's recordings: choosing one for each call, beginning steps, and freeing what is no longer needed."""
