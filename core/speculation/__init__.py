"""How many tokens to draft: measured costs, estimated acceptance, the choice between them, and who watches it.

Knows no tensor, no device and no speculator.
"""
