"""Built-in grammar components."""
