"""Built-in tool parsers: one folder per family of text formats."""
