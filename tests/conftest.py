"""What holds for all tests."""

import os
from pathlib import Path

from hypothesis import settings

# Nothing here talks to the world. Each router, and each process of the tests, would read all of the system's
# authorities: that was a third of the time of the router's tests. The key of this one was thrown away.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "data/authority.pem")

# How long an example takes says something of the machine, not of the code.
settings.register_profile("warmroute", deadline=None)
settings.load_profile("warmroute")
