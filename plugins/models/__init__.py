"""Built-in model implementations."""
