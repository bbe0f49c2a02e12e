"""What one backward has to remember, and what a wrapper remembers from one backward to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from compat._buckets import Reduction
from compat._peers import Meeting


@dataclass(slots=True)
class Session:
    """One run of autograd's engine through a wrapper's parameters.

    Attributes:
        reduces: Whether lanes reduce what they get.
        meeting: Of all ranks, where there is one before the first bucket.
        is_local: Whether gradients stay on this rank.
        waiting: Lanes whose gradients are still to come.
        grads: Gradients by place, each with whether it may be written to.
        started: Reductions, in the order of buckets.
        returned: What was handed on for each parameter, to tell what else reaches it.
        outside: Places that something else reached.
    """

    reduces: bool = False
    meeting: Meeting | None = None
    is_local: bool = False
    waiting: set[int] = field(default_factory=set)
    grads: dict[int, tuple[Tensor, bool]] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)
    started: list[Reduction] = field(default_factory=list)
    returned: list[tuple[int, int] | None] | None = None
    outside: set[int] = field(default_factory=set)
    will_look_outside: bool = False


@dataclass(slots=True)
class Memory:
    """What a wrapper knows from one backward to the next.

    Attributes:
        local: Ids of parameters whose ``.grad`` holds what this rank alone has added.
        looks_outside: Whether some loss has used parameters outside of the wrapper's forward.
        agreed: What all ranks are known to send alike: layouts of parameters.
    """

    local: set[int] = field(default_factory=set)
    looks_outside: bool = False
    agreed: set[int] = field(default_factory=set)
