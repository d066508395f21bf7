"""Built-in model sources."""
