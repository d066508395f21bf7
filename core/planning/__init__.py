"""What a model will take of a device, computed before a weight is read."""
