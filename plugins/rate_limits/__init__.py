"""Built-in rate limiters."""
