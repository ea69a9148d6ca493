"""What holds for all tests."""

from hypothesis import settings

# How long an example takes says something of the machine, not of the code.
settings.register_profile("warmroute", deadline=None)
settings.load_profile("warmroute")
