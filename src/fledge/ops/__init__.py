"""Mathematics on tensors: pure functions, each fast one with a plain twin."""
