"""torch.func.jvp in several threads at the same time.

Torch keeps one count of nested jvps and one dual level for the process: the first jvp opens the
level, and its end deletes the tangents of every other thread's jvp, which then returns zeros. Here
the level is open from the first jvp of any thread to the end of the last.
"""

from __future__ import annotations

import os
import threading

from torch._functorch import eager_transforms
from torch._guards import TracingContext
from torch.autograd import forward_ad

_enter = eager_transforms.enter_jvp_nesting
_exit = eager_transforms.exit_jvp_nesting
_lock = threading.Lock()
_users = 0


def _enter_shared() -> int:
    global _users
    if TracingContext.try_get() is not None:  # Dynamo records torch's own protocol in its graph.
        return _enter()
    with _lock:
        if _users == 0:
            forward_ad.enter_dual_level()  # type: ignore[no-untyped-call]
            eager_transforms.JVP_NESTING += 1  # So that torch does not open the level itself.
        _users += 1
        return _enter()


def _exit_shared() -> None:
    global _users
    if TracingContext.try_get() is not None:
        _exit()
        return
    with _lock:
        _exit()
        _users -= 1
        if _users == 0:
            eager_transforms.JVP_NESTING -= 1
            forward_ad.exit_dual_level()  # type: ignore[no-untyped-call]


def num_user_levels() -> int:
    """Return how many dual levels are open beside the one that jvps share."""
    with _lock:
        return int(forward_ad._current_level) + 1 - (_users > 0)


def install() -> None:
    """Put the shared level in the place of torch's; done once."""
    eager_transforms.enter_jvp_nesting = _enter_shared
    eager_transforms.exit_jvp_nesting = _exit_shared


install()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # The thread that held it does not exist in the child.


os.register_at_fork(after_in_child=_after_fork)
