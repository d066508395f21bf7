"""Built-in quantizations."""
