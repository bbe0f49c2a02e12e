"""How long to wait for others."""

from __future__ import annotations

import os


def waiting_time() -> float:
    """Return ``FUNCPAR_TIMEOUT``: seconds that a shard or a process waits for the others.

    Raises:
        ValueError: It is no number.
    """
    given = os.environ.get("FUNCPAR_TIMEOUT", "300")
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"FUNCPAR_TIMEOUT={given!r} is not a number of seconds.\nSet it to one.") from None
