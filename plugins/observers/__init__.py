"""Built-in lifecycle observers."""
