"""Training: a head that learns what serving will ask of it."""
