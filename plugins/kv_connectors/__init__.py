"""Built-in KV connectors."""
