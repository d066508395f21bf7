"""Built-in KV caches."""
