"""Hypothesis without deadlines: a busy machine is not a slow test."""

from hypothesis import settings

settings.register_profile("fledge", deadline=None, print_blob=True)
settings.load_profile("fledge")
