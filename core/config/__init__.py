"""The YAML tree: its models, and how a file becomes one of them."""
