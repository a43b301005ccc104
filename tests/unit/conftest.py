"""Hypothesis without deadlines and without luck: a busy machine is not a slow test, and what passed
once passes again.
"""

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fledge",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("fledge")
