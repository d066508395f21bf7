"""Built-in reasoning parsers: one folder per way to mark thoughts."""
