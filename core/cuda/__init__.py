"""The step on a CUDA device: inputs, sampling and captured graphs. Imported only where such a device was chosen."""
