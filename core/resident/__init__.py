"""What the runner does for a resident speculator: draft KV in the target's pages, drafting, following."""
