"""Wrong uses of collectives, those of the golden data among them, are refused with the reason and the fix."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from golden import AXIS, DATA

import funcpar as fp

FOUR = torch.ones(4)
TABLE = {
    "psum_scatter_size": r"psum_scatter: x: scatter_dimension=0 has size 3, and there are 4 sh.*\n.*tiled",
    "psum_scatter_tiled_indivisible": r"psum_scatter: x: scatter_dimension=0 has size 6, which 4 shards do",
    "psum_scatter_0d": r"psum_scatter: x: scatter_dimension=0 is out of range for 0 dimensions",
    "psum_scatter_dim_out_of_range": r"psum_scatter: x: scatter_dim.*=1 is out of range for 1.*\n.*-1 to 0",
    "psum_scatter_uneven_groups": r"psum_scatter: axis_index_groups=\[\[0\], \[1, 2, 3\]\] has groups of dif",
    "all_to_all_size": r"all_to_all: x: split_axis=0 has size 2, and there are 4 sh.*\n.*size 4, or tiled",
    "all_to_all_tiled_indivisible": r"all_to_all: x: split_axis=0 has size 6, which 4 sh.*\n.*multiple of 4",
    "all_to_all_split_out_of_range": r"all_to_all: x: split_axis=1 is out of range for 1 dimensions",
    "all_gather_axis_out_of_range": r"all_gather: x: axis=5 is out of range for 2 dim.*\n.*-2 to 1",
    "all_gather_tiled_0d": r"all_gather: x: axis=0 is out of range for 0 dimensions",
    "all_gather_uneven_groups": r"all_gather: axis_index_groups=.* has groups of different sizes",
    "pswapaxes_size": r"pswapaxes: x: axis=0 has size 2, and there are 4 shards",
    "ppermute_duplicate_destination": r"ppermute: perm=\[\(0, 1\), \(2, 1\)\].* destination 1 occurs 2 times",
    "ppermute_duplicate_source": r"ppermute: perm=\[\(0, 1\), \(0, 2\)\].* source 0 occurs 2 times",
    "ppermute_destination_out_of_range": r"ppermute: perm=.* of size 4: destination 7 is out of.*\n.*0 to 3",
    "pshuffle_not_a_permutation": r"pshuffle: perm=\[1, 1, 2, 3\] is not a perm.* of 0..3.\n.*every rank",
    "groups_overlap": r"psum: axis_index_groups=.* for an axis of size 4: 1 occurs 2 times.\nGive groups",
    "groups_incomplete": r"psum: axis_index_groups=.* for an axis of size 4: 3 is missing",
    "groups_index_out_of_range": r"psum: axis_index_groups=.* of size 4: index 4 is out of range, 3 is",
}
ACCEPTED = {"psum_scatter_bool"}
COLLECTIVE_ERRORS = [entry for entry in DATA["errors"] if "collective" in entry]

# The other errors of the golden data, in funcpar's spelling.
OTHERS: dict[str, tuple[type[BaseException], str, Callable[[], Any]]] = {
    "unknown_axis_psum": (
        fp.UnboundAxisError,
        r"psum: axis 'j' is not bound here; the live axes are 'i'.\nName one of those.*axis_name='j'",
        lambda: fp.pmap(lambda a: fp.psum(a, "j"), "i", in_axes=0)(FOUR),
    ),
    "unknown_axis_axis_index": (
        fp.UnboundAxisError,
        r"axis_index: axis 'k' is not bound here; the live axes are 'i'",
        lambda: fp.pmap(lambda a: a + fp.axis_index("k"), "i", in_axes=0, devices=2)(FOUR),
    ),
    "collective_outside_pmap": (
        fp.UnboundAxisError,
        r"psum: axis 'i' is needed, and the call is made outside of every pmap.\nCall it in a function that",
        lambda: fp.psum(FOUR, "i"),
    ),
    "psum_of_string": (
        TypeError,
        r"psum: x is a str, not a tensor or a number.\nGive a tree of tensors and numbers",
        lambda: fp.pmap(lambda a: fp.psum("text", "i"), "i", in_axes=0)(FOUR),
    ),
    "grad_of_pmax": (
        NotImplementedError,
        r"pmax has no gradient.\nDetach its operand",
        lambda: fp.pmap(fp.grad(lambda a: fp.pmax(a[0] ** 2, "i")), "i", in_axes=0)(FOUR),
    ),
    "mapped_sizes_disagree": (
        ValueError,
        r"mapped arguments disagree on the number of rows:\n  a +in_axes=0 +4 rows\n  b +in_axes=0 +3 rows",
        lambda: fp.pmap(lambda a, b: a + b, in_axes=0)(FOUR, torch.ones(3)),
    ),
    "nothing_mapped": (
        ValueError,
        r"nothing is mapped in this call \(a\): in_axes=None splits none.*\n.*in_axes=0",
        lambda: fp.pmap(lambda a: a, in_axes=None)(FOUR),
    ),
    "no_arguments": (
        ValueError,
        r"nothing is mapped in this call \(no arguments\)",
        fp.pmap(lambda: 1),
    ),
    "rank_too_small": (
        ValueError,
        r"a has 1 dimensions, and in_axes splits it along dimension 1.\nGive it an axis from -1 to 0",
        lambda: fp.pmap(lambda a: a, in_axes=1)(FOUR),
    ),
    "in_axes_bad_leaf": (
        ValueError,
        r"in_axes='0' is unknown.\nGive \"auto\", an int, None",
        lambda: fp.pmap(lambda a: a, in_axes="0"),
    ),
    "in_axes_not_a_prefix": (
        ValueError,
        r"in_axes has 1 entries, and the call gives b, which has none",
        lambda: fp.pmap(lambda a, b: a, in_axes=(0,))(FOUR, FOUR),
    ),
    "out_axes_not_a_prefix": (
        ValueError,
        r"out_axes.*the prefix has a tuple of 3, the tree has a tuple of 2",
        lambda: fp.pmap(lambda a: (a, a), in_axes=0, out_axes=(0, 0, 0))(FOUR),
    ),
    "axis_size_disagrees": (
        TypeError,
        r"unexpected keyword argument 'axis_size'",
        lambda: fp.pmap(lambda a: a, axis_size=3),
    ),
    "devices_empty": (
        ValueError,
        r"devices",
        lambda: fp.pmap(lambda a: a, in_axes=0, devices=[])(FOUR),
    ),
    "user_exception_surfaces": (
        ZeroDivisionError,
        r"^integer division or modulo by zero\nraised in shard 0 of 4 on cpu",
        lambda: fp.pmap(lambda a: a / (1 // 0), in_axes=0)(FOUR),
    ),
}  # fmt: skip

# What JAX refuses and funcpar answers, and why.
ANSWERED: dict[str, Callable[[], Any]] = {
    # Rows are split over the devices, so their number needs not be that of the devices.
    "more_than_devices": lambda: torch.equal(
        fp.pmap(lambda a: a, in_axes=0)(torch.arange(5.0)), torch.arange(5.0)
    ),
    # A scalar has no rows and is replicated, whether by position or by keyword.
    "scalar_keyword": lambda: torch.equal(fp.pmap(lambda a, k: a + k, in_axes=0)(FOUR, k=1.0), FOUR + 1),
    # A static argument may be left to its default: arguments are bound by the signature.
    "static_too_few": lambda: torch.equal(
        fp.pmap(lambda a, k=1: a * k, in_axes=0, static_broadcasted_argnums=1)(FOUR), FOUR
    ),
    # Nothing is compiled and kept by the value of a static argument, so it need not be hashed.
    "static_unhashable": lambda: torch.equal(
        fp.pmap(lambda a, k: a * k[0], in_axes=0, static_broadcasted_argnums=1)(FOUR, [3]), FOUR * 3
    ),
    # What all shards agree on is returned once, of whatever type.
    "string_output": lambda: fp.pmap(lambda a: "text", in_axes=0, devices=2)(FOUR) == "text",
}


def test_all_errors_of_the_data_are_used():
    names = {entry["id"] for entry in DATA["errors"]}
    assert len(names) == 40
    assert names == set(TABLE) | ACCEPTED | set(OTHERS) | set(ANSWERED)


@pytest.mark.parametrize("entry", COLLECTIVE_ERRORS, ids=[entry["id"] for entry in COLLECTIVE_ERRORS])
def test_a_wrong_collective_is_refused_on_every_shard(entry: dict[str, Any]):
    call, kwargs = getattr(fp, entry["collective"]), entry["kwargs"]
    x = torch.ones(entry["x_shape"], dtype=getattr(torch, entry["dtype"]))
    seen: dict[int, BaseException] = {}

    def body(x: torch.Tensor) -> torch.Tensor:
        try:
            return call(x[0], AXIS, **kwargs)[None]
        except Exception as error:
            seen[fp.axis_index()] = error
            raise

    mapped = fp.pmap(body, AXIS, in_axes=0, out_axes=0, devices=entry["axis_size"])
    if entry["id"] in ACCEPTED:  # Booleans are summed as int64, as torch sums them.
        assert torch.equal(mapped(x), torch.tensor([2, 2]))
        return
    kind = {"ValueError": ValueError, "TypeError": TypeError}[entry["suggested_error_type"]]
    with pytest.raises(kind, match=TABLE[entry["id"]]):
        mapped(x)
    assert {type(error) for error in seen.values()} == {kind}
    assert sorted(seen) == list(range(entry["axis_size"]))


@pytest.mark.parametrize("name", OTHERS)
def test_a_wrong_call_is_refused(name: str):
    kind, pattern, call = OTHERS[name]
    with pytest.raises(kind, match=re.compile(pattern, re.DOTALL)):
        call()


@pytest.mark.parametrize("name", ANSWERED)
def test_what_jax_refuses_is_answered_where_the_answer_is_clear(name: str):
    assert ANSWERED[name]()


@pytest.mark.parametrize("around", [fp.grad, torch.func.grad], ids=["fp", "torch.func"])
@pytest.mark.parametrize("name", ["pmax", "pmin"])
@pytest.mark.parametrize("place", ["inside", "outside"])
def test_an_extremum_refuses_its_gradient_wherever_it_is_taken(devices, place: str, name: str, around: Any):
    call = getattr(fp, name)
    calls = {
        "inside": fp.pmap(around(lambda a: call(a.sum())), in_axes=0),
        "outside": around(lambda a: fp.pmap(call, in_axes=0, out_axes=0)(a).sum()),
    }
    with pytest.raises(NotImplementedError, match=rf"{name} has no gradient.\nDetach its operand, {name}\("):
        calls[place](torch.ones(12))


def test_an_extremum_refuses_its_gradient_in_backward():
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"pmax has no gradient"):
        fp.pmap(fp.pmax, in_axes=0, out_axes=0)(x).sum().backward()


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_an_extremum_refuses_its_tangent():
    body = lambda a: torch.func.jvp(fp.pmax, (a,), (a,))[1]
    with pytest.raises(NotImplementedError, match=r"pmax has no gradient"):
        fp.pmap(body, in_axes=0, out_axes=0)(FOUR)
    with pytest.raises(NotImplementedError, match=r"pmax has no gradient"):
        torch.func.jvp(fp.pmap(fp.pmax, in_axes=0, out_axes=0), (FOUR,), (FOUR,))


def test_an_extremum_of_complex_numbers_is_refused():
    with pytest.raises(TypeError, match=r"pmax: x.*complex"):
        fp.pmap(fp.pmax, in_axes=0, out_axes=0)(torch.ones(4, dtype=torch.complex64))


def test_an_unbound_axis_lists_the_live_ones():
    inner = fp.pmap(lambda a: fp.psum(a, "rows"), "inner", in_axes=0)
    with pytest.raises(
        fp.UnboundAxisError, match=r"axis 'rows' is not bound here; the live axes are 'outer', 'inner'"
    ):
        fp.pmap(inner, "outer", in_axes=0)(FOUR)
    with pytest.raises(fp.UnboundAxisError, match=r"the live axes are unnamed"):
        fp.pmap(lambda a: fp.psum(a, "rows"), in_axes=0)(FOUR)
    with pytest.raises(fp.UnboundAxisError, match=r"axis_size: an axis is needed"):
        fp.axis_size()


@pytest.mark.parametrize(
    ("call", "kind", "pattern"),
    [
        (lambda x: fp.ppermute(x, perm=[(0, -1)]), ValueError, r"ppermute: .*destination -1 is out of range"),
        (lambda x: fp.ppermute(x, perm=[0, 1]), TypeError, r"ppermute: perm=\[0, 1\] is not a list of pairs"),
        (lambda x: fp.pshuffle(x, perm=[1, 0]), ValueError, r"pshuffle: perm=\[1, 0\] is not a permutation"),
        (lambda x: fp.pbroadcast(x, source=4), ValueError, r"pbroadcast: source=4 is out of range for an"),
        (lambda x: fp.pbroadcast(x, source=-1), ValueError, r"pbroadcast: source=-1 is out of range"),
        (lambda x: fp.all_gather(x, axis=0.5), TypeError, r"all_gather: x: axis=0.5 is not an integer"),
        (lambda x: fp.all_gather(x, axis=True), TypeError, r"all_gather: x: axis=True is not an integer"),
        (lambda x: fp.psum({"a": [x, "b"]}), TypeError, r"psum: x\['a'\]\[1\] is a str, not a tensor or a"),
        (lambda x: fp.psum_scatter({"w": x}), ValueError, r"psum_scatter: x\['w'\]: scatter_dimension=0 has"),
        (lambda x: fp.pmean(x, axis_index_groups=[[0, 1], [2]]), ValueError, r"pmean: .*: 3 is missing"),
        (lambda x: fp.all_to_all(x[None], concat_axis=3, tiled=True), ValueError, r"split_axis=0 has size 1"),
    ],
)  # fmt: skip
def test_wrong_options_are_refused_up_front(call: Any, kind: Any, pattern: str):
    with pytest.raises(kind, match=pattern):
        fp.pmap(call, in_axes=0, out_axes=0)(FOUR)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda a: fp.pmean(a, axis_index_groups=[[0], [1, 2, 3]]), [0.0, 2.0, 2.0, 2.0]),
        (lambda a: a * 0 + fp.psum(1, axis_index_groups=[[0], [1, 2, 3]]), [1.0, 3.0, 3.0, 3.0]),
        (lambda a: fp.pmax(torch.where(a == 1, torch.nan, a)), [torch.nan] * 4),
        (lambda a: fp.all_to_all(a.expand(4)[None], split_axis=-1, concat_axis=-1)[0, :1], [0.0] * 4),
    ],
    ids=["pmean over uneven groups", "constant over uneven groups", "NaN", "negative axes"],
)
def test_jaxs_quirks_are_not_copied(call: Any, expected: list[float]):
    found = fp.pmap(call, in_axes=0, out_axes=0)(torch.arange(4.0))
    torch.testing.assert_close(found, torch.tensor(expected), equal_nan=True, rtol=0, atol=0)


def test_a_promise_that_all_shards_agree_is_checked():
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"output was promised equal.*\(shard 1, 2, 3 from shard 0\)"
    ):
        fp.pmap(lambda a: a, in_axes=0, out_axes=None)(torch.arange(4.0))
