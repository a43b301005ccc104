"""Hypothesis without deadlines: a busy machine is not a slow test."""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fledge",
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fledge")
