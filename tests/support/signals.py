"""Signals to a process at moments that it does not choose."""

import os
import subprocess

Moments = list[tuple[float, str]]
_senders: "list[subprocess.Popen[bytes]]" = []  # kept, or Python would warn of those that still run


def signal_me(moments: Moments) -> "subprocess.Popen[bytes]":
    """Start a process that sends signals to this one, each after so many seconds: [(0.1, "STOP"), (0.5, "CONT")]."""
    script = "; ".join(f"sleep {seconds:.4f}; kill -{name} {os.getpid()}" for seconds, name in moments)
    _senders[:] = [sender for sender in _senders if sender.poll() is None]
    _senders.append(subprocess.Popen(["sh", "-c", script], start_new_session=True))
    return _senders[-1]
