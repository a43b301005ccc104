"""The engine: requests in, tokens out, the same with and without a head."""
