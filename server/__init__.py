"""The HTTP side: OpenAI-compatible routes, streaming, metrics, and the `engine` command."""
