"""OpenAI's Responses API over the chat path: items in, items out, and answers kept in memory to go on from."""
