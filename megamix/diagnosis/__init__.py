"""What a run says of its numbers: overflows in words, and FP16's range layer by layer."""
