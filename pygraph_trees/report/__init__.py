"""Records of what happened to each compiled graph and function, and their views: text, HTML and JSON."""
