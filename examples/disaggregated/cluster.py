"""A whole cluster on this machine: one engine for prompts, one for answers, and a router in front of them.

python examples/disaggregated/cluster.py
curl localhost:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

Ctrl-C ends all three. When one of them ends by itself, the others are ended, too.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ENGINE = str(Path(sys.executable).with_name("engine"))
COMMANDS = (
    [ENGINE, "serve", str(HERE / "engine.yaml"), "--role", "prefill", "--port", "8101"],
    [ENGINE, "serve", str(HERE / "engine.yaml"), "--role", "decode", "--port", "8102"],
    [ENGINE, "route", str(HERE / "router.yaml")],
)


def main() -> int:
    """Start, wait, end; returns the exit code."""
    for each in (signal.SIGINT, signal.SIGTERM):  # the first may be ignored where this runs in the background
        signal.signal(each, signal.default_int_handler)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in COMMANDS:
            processes.append(subprocess.Popen(command, start_new_session=True))
        while all(process.poll() is None for process in processes):
            time.sleep(0.2)
    except KeyboardInterrupt:
        return 0
    finally:
        for process in reversed(processes):  # the router first: it lets its answers finish
            process.terminate()
            process.wait()
    return 1


if __name__ == "__main__":
    sys.exit(main())
