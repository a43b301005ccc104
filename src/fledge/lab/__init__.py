"""Measures heads on real tasks with the serving engine, chooses, tunes, and reports."""
