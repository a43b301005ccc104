"""Sweeps: many runs of training that differ in some settings, compared by accept length."""
