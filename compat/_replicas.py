"""Calls of modules and functions on several devices at once: the one place that runs replicas."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

import funcpar as fp
from compat._nodes import leaves_of, put_together, rebuilt, take_apart, with_packed, without_packed
from compat._watch import Watch
from compat._wrappers import without_wrappers
from compat._writes import Writes

Policy: TypeAlias = Literal["first", "mean"]
Shards: TypeAlias = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]


class Host(nn.Module):
    """What is functionalized in place of a module, so that a function may be called on the replica itself."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __call__(self, fun: Callable[..., Any], *args: Any) -> Any:
        """Return ``fun(replica, *args)``; no hook is called on the way."""
        return fun(self.module, *args)


@dataclass(slots=True)
class Subject:
    """One module of a call, with what its replicas are made of.

    Attributes:
        module: The module itself.
        given: Tensors in place of its own, by name.
        ranks: The shards that run a replica of it.
        replaced: The buffers that the first replica made anew.
    """

    module: nn.Module
    given: Mapping[str, Tensor] = field(default_factory=dict)
    ranks: list[int] = field(default_factory=list)
    replaced: set[str] = field(default_factory=set)
    apply: Callable[..., Any] = field(init=False)
    params: dict[str, Tensor] = field(init=False)
    buffers: dict[str, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        host = Host(without_wrappers(self.module))
        self.apply, _, _ = fp.functionalize_with_buffers(host)
        # The module's own tensors, not detached ones: gradients belong to them.
        self.params = {name: self.given.get(name, tensor) for name, tensor in host.named_parameters()}
        self.buffers = {name: self.given.get(name, tensor) for name, tensor in host.named_buffers()}


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one replica leaves beside the tensors it returns, those apart."""

    skeleton: Any
    buffers: dict[str, Tensor]


def run(
    funs: Sequence[Callable[..., Any]],
    shards: Shards,
    devices: Sequence[int],
    call: str,
    *,
    invoke: Callable[..., Any] | None = None,
    policy: Policy = "first",
    given: Mapping[str, Tensor] | None = None,
    dim: int = 0,
    weigh: bool = False,
) -> tuple[list[Any], list[str]]:
    """Call each function or module on its arguments, shard i on devices[i], all at once.

    A module runs as a replica that shares its parameters. Afterwards buffers follow the policy, and
    attributes that its first replica wrote are on the module.

    Args:
        funs: One per shard; the same module may be there several times.
        shards: Positional and keyword arguments of each.
        devices: Ranks.
        call: How messages name the call.
        invoke: ``invoke(replica, args, kwargs)`` in place of a plain call.
        policy: Whose buffers are kept.
        given: Tensors in place of the modules' own, by name; then nothing is kept.
        dim: The dimension of rows, which weight a mean.
        weigh: Whether rows weight the means that forward takes with fp.pmean too.

    Returns:
        The outputs, and what was written and is not all kept.
    """
    bound = [_module_of(fun) for fun in funs]
    subjects = _subjects_of([fun for fun, _ in bound], given or {})
    answers: list[Any] = [None] * len(funs)

    def body_of(rank: int) -> Callable[..., list[Tensor]]:
        fun, call_it = bound[rank]
        subject = subjects.get(id(fun))

        def body(params: Any, buffers: Any, arguments: Any, packed: list[Tensor]) -> list[Tensor]:
            args, kwargs = with_packed(_writable(arguments), _writable(packed))
            if subject is None:
                tensors, skeleton = take_apart((fun(*args, **kwargs), None), call)
                answers[rank] = _Answer(skeleton, {})
                return tensors
            is_first = rank == subject.ranks[0]
            watched = partial(_watched, subject, invoke or call_it, is_first)
            out, new = subject.apply(params, buffers, watched, args, kwargs)
            tensors, skeleton = take_apart(out, call)
            answers[rank] = _Answer(skeleton, _changed(buffers, new if policy == "mean" or is_first else {}))
            return tensors

        return body

    inputs = [
        (*_own_tensors(subjects.get(id(fun))), *without_packed(shard))
        for (fun, _), shard in zip(bound, shards, strict=True)
    ]
    rows = [rows_of(shard, dim) for shard in shards]
    weights = rows if weigh and any(rows) else None
    bodies = [body_of(rank) for rank in range(len(funs))]
    found = fp.parallel_call(bodies, inputs, devices=list(devices), weights=weights)
    whole = [put_together(answer.skeleton, t) for answer, t in zip(answers, found, strict=True)]
    names: list[str] = []
    for subject in () if given else subjects.values():
        changes = [answers[rank].buffers for rank in subject.ranks]
        _keep_buffers(subject, changes, [rows[rank] for rank in subject.ranks], policy)
        names += _keep_writes([whole[rank][1] for rank in subject.ranks])
    return [out for out, _ in whole], list(dict.fromkeys(names))


def _subjects_of(funs: Sequence[Callable[..., Any]], given: Mapping[str, Tensor]) -> dict[int, Subject]:
    """Return the modules among the functions, by id, each with its shards."""
    subjects: dict[int, Subject] = {}
    for rank, fun in enumerate(funs):
        if isinstance(fun, nn.Module):
            if id(fun) not in subjects:
                subjects[id(fun)] = Subject(fun, {f"module.{k}": v for k, v in given.items()})
            subjects[id(fun)].ranks.append(rank)
    return subjects


def _own_tensors(subject: Subject | None) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    return ({}, {}) if subject is None else (subject.params, subject.buffers)


def _keep_writes(writes: Sequence[Writes]) -> list[str]:
    """Put what the first replica of a module wrote on it; return the names that are not all kept."""
    writes[0].put_on_originals()
    return writes[0].lost if len(writes) == 1 else [name for one in writes for name in (*one.kept, *one.lost)]


def rows_of(shard: tuple[Any, Any], dim: int) -> int:
    """Return the rows of a shard: those of its first tensor; 1 if there is none."""
    tensors = (leaf for _, leaf in leaves_of(shard) if isinstance(leaf, Tensor) and leaf.dim() > 0)
    return next((t.shape[dim] for t in tensors if -t.dim() <= dim < t.dim()), 1)


def told(names: Sequence[str], call: str) -> str:
    """Return the warning about attributes that several replicas wrote."""
    return (
        f"{call}: forward writes {', '.join(names)} on its module, and every replica does. What the first "
        f"replica wrote is kept if it can be, the rest is gone.\nReturn such values, or keep them in buffers."
    )


def _module_of(fun: Callable[..., Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return a module for its bound method too, and how its replica is called."""
    owner, name = getattr(fun, "__self__", None), getattr(fun, "__name__", "")
    if isinstance(owner, nn.Module) and getattr(owner, name, None) == fun:
        return owner, lambda replica, args, kwargs: getattr(replica, name)(*args, **kwargs)
    return fun, lambda replica, args, kwargs: replica(*args, **kwargs)


def _watched(
    subject: Subject,
    invoke: Callable[..., Any],
    keeps_writes: bool,
    replica: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    if subject.given:
        return invoke(replica, args, kwargs), None
    for param in replica.parameters():
        if not isinstance(param, nn.Parameter):
            param._is_param = True  # What stands for a parameter may be assigned as one.
    watch = Watch(replica, subject.module, len(subject.ranks) == 1)
    before = dict(replica.named_buffers())
    out = invoke(replica, args, kwargs)
    writes = watch.writes()
    if keeps_writes:
        now = replica.named_buffers()
        subject.replaced = {f"module.{name}" for name, buffer in now if before.get(name) is not buffer}
    return out, writes if keeps_writes else Writes(lost=[*writes.kept, *writes.lost])


def _writable(tree: Any) -> Any:
    """Copy what autograd would not let a replica write to in place, as a plain module may.

    That is a stand-in for what requires a gradient, and a piece whose versions count for all pieces.
    """
    if not torch.is_grad_enabled():
        return tree
    return rebuilt(tree, _own)


def _own(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) and (leaf.requires_grad or leaf._is_view()) else leaf


def _changed(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the buffers that changed: a needless write would invalidate graphs that hold the old value."""
    return {name: new.detach() for name, new in after.items() if not _same(before[name], new)}


def _same(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.is_meta or one.layout is not torch.strided:
        return False
    try:
        return torch.equal(one, other)
    except RuntimeError:  # Values of a torch.func level are not to be looked at.
        return False


def _keep_buffers(
    subject: Subject, changes: list[dict[str, Tensor]], rows: list[int], policy: Policy
) -> None:
    kept = changes[0]
    if policy == "mean":
        names = dict.fromkeys(name for change in changes for name in change)
        for name in names:
            old = subject.buffers[name]
            parts = [change.get(name, old) for change in changes]
            kept[name] = _mean(parts, rows) if old.is_floating_point() or old.is_complex() else parts[0]
    with torch.no_grad():
        for name, new in kept.items():
            old = subject.buffers[name]
            if name not in subject.replaced and old.shape == new.shape and old.dtype == new.dtype:
                old.copy_(new)
            else:
                owner, _, key = name.removeprefix("module.").rpartition(".")
                subject.module.get_submodule(owner)._buffers[key] = new


def _mean(parts: list[Tensor], rows: list[int]) -> Tensor:
    if not sum(rows):
        return parts[0]
    total = torch.zeros_like(parts[0])
    for part, count in zip(parts, rows, strict=True):
        total = total + part * (count / sum(rows))
    return total
