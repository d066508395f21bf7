"""Settings of all tests."""

from __future__ import annotations

import os
from pathlib import Path

from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton's kernels run without a GPU; read when triton is first imported

# No test depends on how fast the machine is.
settings.register_profile("engine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("engine")
