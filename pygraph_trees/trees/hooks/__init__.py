"""The functions through which torch reaches the trees."""
