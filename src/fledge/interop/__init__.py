"""Heads in the formats of other engines: import, export, and running them there."""
