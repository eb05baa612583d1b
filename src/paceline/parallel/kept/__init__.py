"""What a model or a loss function keeps besides parameters: buffers, counters, tensors and numbers in attributes."""
