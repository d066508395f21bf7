"""Built-in weight loaders."""
