"""What text parsers are made of: a reader that waits for text, JSON read as it comes, and whole families of formats.

Public to plugins. A parser is a generator over a `Reader`: it reads as if all text were there and is suspended where it
isn't, so the way the text is cut can't change what it says.
"""
