"""The errors that a caller may want to catch, and how they are told apart.

    NameError
      └─ UnboundAxisError          a collective names an axis that no running pmap binds
    ValueError
      └─ ReplicaMismatchError      the shards of one axis did not make the same call
    TimeoutError
      └─ CollectiveTimeoutError    a shard never came to a call that the others wait in
    RuntimeError
      ├─ ProcessFailedError        another process failed in the call, or is gone
      └─ ShardAborted              another shard failed first; never reaches the caller

Everything else is a plain ``TypeError`` (wrong kind) or ``ValueError`` (wrong value).
"""


class UnboundAxisError(NameError):
    """No running pmap binds the axis that was named.

    Example:
        >>> import funcpar as fp
        >>> issubclass(fp.UnboundAxisError, NameError)
        True
    """


class ReplicaMismatchError(ValueError):
    """The shards of one axis made different calls, or one returned while others waited.

    Raised on every shard, naming both calls and where they were made.

    Example:
        >>> import funcpar as fp
        >>> issubclass(fp.ReplicaMismatchError, ValueError)
        True
    """


class CollectiveTimeoutError(TimeoutError):
    """A shard did not come to a collective within ``FUNCPAR_TIMEOUT`` seconds (default 300).

    Example:
        >>> import funcpar as fp
        >>> issubclass(fp.CollectiveTimeoutError, TimeoutError)
        True
    """


class ProcessFailedError(RuntimeError):
    """Another process failed in a call that spans all processes, or is gone.

    Raised in every other process, naming the process and the call.

    Example:
        >>> import funcpar as fp
        >>> issubclass(fp.ProcessFailedError, RuntimeError)
        True
    """


class ShardAborted(RuntimeError):
    """Another shard failed first. The machine raises that failure instead of this one."""
