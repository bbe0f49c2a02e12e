"""scatter, gather, replicate and parallel_apply, piece by piece."""

import io
from collections import OrderedDict, defaultdict

import pytest
import torch
from compat_models import Calling, Named, Point, Result, assert_close, ids, mlp, rand
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_sequence, unpack_sequence

import compat
import funcpar as fp


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 9, 13])
def test_scatter_cuts_balanced_pieces_in_order_and_gather_joins_them(devices, rows):
    x = rand(rows, 2)
    pieces = compat.scatter(x, ids())
    sizes = [len(piece) for piece in pieces]
    assert type(pieces) is tuple
    assert len(pieces) == max(1, min(rows, len(devices)))
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(compat.gather(pieces, "cpu"), x)


@given(
    st.recursive(
        st.sampled_from(["tensor", "0-d", "a", None, 3]),
        lambda below: st.lists(below, max_size=3) | st.dictionaries(st.sampled_from("abc"), below, max_size=3)
        | st.tuples(below, below),
        max_leaves=8,
    ),
    st.integers(0, 9), st.integers(1, 4), st.integers(0, 1),
)  # fmt: skip
def test_what_is_scattered_is_gathered_again(shape, rows, count, dim):
    sizes = (2, rows) if dim else (rows, 2)
    tree = fp.tree.map(lambda leaf: rand(*sizes) if leaf == "tensor" else leaf, [torch.zeros(sizes), shape])
    tree = fp.tree.map(lambda leaf: rand(1)[0] if isinstance(leaf, str) and leaf == "0-d" else leaf, tree)
    pieces = compat.scatter(tree, range(count), dim)
    assert len(pieces) == max(1, min(rows, count))
    taken = [[leaf.shape[dim] for leaf in fp.tree.leaves(p) if isinstance(leaf, torch.Tensor) and leaf.dim()]
             for p in pieces]  # fmt: skip
    assert all(len(set(each)) == 1 for each in taken)
    tensors = [
        [leaf for leaf in fp.tree.leaves(p) if isinstance(leaf, torch.Tensor) and leaf.dim()] for p in pieces
    ]
    whole = [leaf for leaf in fp.tree.leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    assert_close(compat.gather(tensors, "cpu", dim), whole)


def test_scatter_returns_torchs_kinds_of_lists():
    x = torch.arange(4)
    assert compat.scatter([], [0, 1]) == [[], []]
    assert compat.scatter("a", [0, 1]) == ["a", "a"]
    assert compat.scatter((x, 1), [0])[0][1] == 1
    for tree in (
        (x, "a"),
        [x, "a"],
        {"x": x, "a": "a"},
        OrderedDict(x=x),
        Point(x, "a"),
        defaultdict(int, x=x),
    ):
        pieces = compat.scatter(tree, devices=[0, 1])
        assert type(pieces) is list
        assert [type(piece) for piece in pieces] == [type(tree)] * 2
        assert torch.equal(fp.tree.leaves(pieces[1])[0], x[2:])


def test_scatter_takes_apart_dataclasses_and_dicts_with_their_own_constructor():
    first, second = compat.scatter((Result(torch.arange(3), "b"), Named("n", {"x": torch.arange(3)})), [0, 1])
    assert (first[0].logits.tolist(), second[0].logits.tolist(), second[0].name) == ([0, 1], [2], "b")
    assert (first[1]["x"].tolist(), second[1].name) == ([0, 1], "n")


def test_scatter_hands_on_what_holds_no_tensor():
    config = Result("none")
    assert all(piece[1] is config for piece in compat.scatter((torch.arange(3), config), [0, 1]))


def test_scatter_along_another_dimension_and_its_gradient():
    x = rand(2, 5, requires_grad=True)
    first, second = compat.scatter(x, [0, 1], dim=-1)
    assert (first.shape, second.shape) == ((2, 3), (2, 2))
    (first.sum() + 2 * second.sum()).backward()
    assert x.grad.tolist() == [[1, 1, 1, 2, 2]] * 2
    assert torch.autograd.gradgradcheck(
        lambda t: compat.gather(compat.scatter(t, [0, 1, 2]), 0).sin(), rand(4, requires_grad=True)
    )


def test_scatter_cuts_packed_sequences_by_sequence():
    rows = [rand(n, 2) for n in (2, 4, 1)]
    packed = pack_sequence(rows, enforce_sorted=False)
    first, second = compat.scatter(packed, [0, 1])
    assert_close(unpack_sequence(first), rows[:2])
    assert_close(unpack_sequence(second), rows[2:])
    assert_close(unpack_sequence(compat.gather([first, second], 0)), rows)


def test_scatter_cuts_sparse_rows():
    x = torch.eye(5).to_sparse()
    pieces = compat.scatter(x, [0, 1])
    assert torch.equal(compat.gather(pieces, 0).to_dense(), torch.eye(5))


def test_scatter_names_every_tensor_where_rows_disagree():
    message = (
        r"scatter: tensors disagree on the number of rows \(dim=0\):\n  inputs\['x'\]     5 rows\n"
        r"  inputs\['y'\]\[0\]  1 row\nGive them all the same"
    )
    with pytest.raises(ValueError, match=message):
        compat.scatter({"x": torch.ones(5), "y": [torch.ones(1)]}, [0, 1])
    with pytest.raises(ValueError, match=r"scatter: inputs has 1 dimensions and dim=1 is to be cut"):
        compat.scatter(torch.ones(5), [0, 1], dim=1)


def test_devices_that_are_not_there_or_no_devices_are_refused_with_those_that_are():
    fp.set_cpu_devices(2)
    x = torch.ones(4)
    with pytest.raises(ValueError, match=r"scatter: there is no device '2'; there are 'cpu:0', 'cpu:1'\."):
        compat.scatter(x, [0, 2])
    with pytest.raises(ValueError, match=r"scatter: 'gpu7' names no device\.\nName one of 'cpu:0', 'cpu:1'"):
        compat.scatter(x, ["gpu7"])
    with pytest.raises(TypeError, match=r"scatter: True is not a device\.\nGive an index"):
        compat.scatter(x, [True])
    with pytest.raises(TypeError, match=r"scatter: 2 is not a list of devices\.\nGive a list"):
        compat.scatter(x, 2)
    with pytest.raises(TypeError, match=r"scatter: target_gpus and devices are the same thing"):
        compat.scatter(x, [0], devices=[0])


def test_scatter_kwargs_gives_as_many_dicts_as_tuples():
    x = torch.arange(5)
    args, kwargs = compat.scatter_kwargs((x,), None, [0, 1])
    assert (len(args), kwargs) == (2, ({}, {}))
    args, kwargs = compat.scatter_kwargs((), {"x": x, "n": 1}, [0, 1])
    assert (args, [sorted(k) for k in kwargs]) == (((), ()), [["n", "x"]] * 2)
    assert compat.scatter_kwargs((), {}, [0, 1]) == ((), ())
    assert compat.scatter_kwargs((x[:1],), {"n": 1}, [0, 1])[1] == ({"n": 1},)
    assert compat.scatter_kwargs((), {"n": 1}, [0, 1]) == (((), ()), ({"n": 1}, {"n": 1}))


def test_gather_joins_along_a_dimension_scalars_into_a_vector_and_is_differentiable():
    a, b = rand(2, 3, requires_grad=True), rand(2, 1, requires_grad=True)
    out = compat.gather([a, b], -1, dim=1)
    assert_close(out, torch.cat([a, b], 1))
    (out * torch.arange(4)).sum().backward()
    assert b.grad.tolist() == [[3], [3]]
    assert compat.gather([torch.tensor(1), torch.tensor(2)], 0).tolist() == [1, 2]
    assert compat.gather([torch.tensor(1)], 0).tolist() == [1]


def test_gather_refuses_what_does_not_fit_together():
    one = torch.ones(1)
    keys = r"replica 0  a dict with the keys 'a'\n  replica 1  a dict with the keys 'b'\n"
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"gather: the replicas disagree on output\['x'\]:\n  " + keys
    ):
        compat.gather([{"x": {"a": one}}, {"x": {"b": one}}], 0)
    with pytest.raises(
        ValueError, match=r"replica 0  a list of 1\n  replica 1  a list of 2\nReturn the same"
    ):
        compat.gather([[one], [one, one]], 0)
    with pytest.raises(ValueError, match=r"replica 0  a tensor of 1 dimensions\n  replica 1  None"):
        compat.gather([one, None], 0)
    with pytest.raises(ValueError, match=r"replica 0  a tensor of 1 dimensions\n  replica 1  a tensor of 0"):
        compat.gather([one, one.sum()], 0)
    with pytest.raises(ValueError, match=r"gather: there are no outputs"):
        compat.gather([], 0)


def test_dicts_with_their_keys_in_another_order_are_joined_by_key():
    joined = compat.gather(
        [{"a": torch.zeros(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)}], 0
    )
    assert {key: value.tolist() for key, value in joined.items()} == {"a": [0, 0], "b": [1, 1]}


@pytest.mark.parametrize("detach", [False, True])
def test_replicas_share_parameters_and_send_their_gradients_unless_detached(detach):
    module = nn.Sequential(mlp(), nn.BatchNorm1d(2).double())
    replicas = compat.replicate(module, [0, 1, 1], detach)
    assert len(replicas) == 3
    for replica in replicas:
        assert [name for name, _ in replica.named_parameters()] == [
            name for name, _ in module.named_parameters()
        ]
        assert all(p.is_leaf is detach for p in replica.parameters())
        assert replica[0][0].weight.data_ptr() == module[0][0].weight.data_ptr()
    out = replicas[1](rand(4, 3)).square().sum()
    assert out.requires_grad is not detach
    if not detach:
        out.backward()
        assert all(p.grad is not None for p in module.parameters())


def test_the_first_replica_has_the_modules_own_buffers_and_the_others_copies():
    module = nn.BatchNorm1d(3).double()
    first, second = compat.replicate(module, [0, 1])
    before = module.running_mean.clone()
    second(rand(4, 3))
    assert torch.equal(module.running_mean, before)
    first(rand(4, 3))
    assert not torch.equal(module.running_mean, before)
    assert compat.replicate(module, []) == []


def test_replicas_can_be_saved():
    file = io.BytesIO()
    torch.save(compat.replicate(mlp(), [0, 1]), file)
    file.seek(0)
    assert len(torch.load(file, weights_only=False)) == 2


def test_what_cannot_be_replicated_is_refused():
    with pytest.raises(TypeError, match=r"replicate: function is not an nn.Module"):
        compat.replicate(lambda x: x, [0])
    with pytest.raises(TypeError, match=r"model.module.weight has no shape yet"):
        compat.replicate(nn.LazyLinear(2), [0, 1])


def test_replicas_run_in_parallel_apply_with_gradients_and_running_statistics(devices):
    module = nn.Sequential(mlp(), nn.BatchNorm1d(2).double())
    x = rand(9, 3)
    pieces = compat.scatter(x, ids())
    replicas = compat.replicate(module, ids())
    outs = compat.parallel_apply(replicas, pieces, devices=ids())
    compat.gather(outs, 0).square().sum().backward()
    assert all(p.grad is not None for p in module.parameters())
    expected = 0.1 * module[0](pieces[0]).mean(0)
    assert_close(module[1].running_mean, expected)
    assert int(module[1].num_batches_tracked) == 1


def test_a_tensor_a_tuple_and_a_list_per_module_mean_the_same():
    module, x = mlp(), rand(6, 3)
    a, b = compat.scatter(x, [0, 1])
    for inputs in ([a, b], [(a,), (b,)], [[a], [b]], compat.scatter(x, [0, 1]), compat.scatter((x,), [0, 1])):
        assert_close(torch.cat(compat.parallel_apply([module, module], inputs)), module(x))


def test_different_modules_and_functions_run_side_by_side_with_keywords():
    l1, l2 = nn.Linear(3, 2).double(), Calling(lambda layer, x, *, by: layer(x) * by)
    x = rand(4, 3)
    outs = compat.parallel_apply([l1, l2, torch.sin], [x, x, x], [{}, {"by": 2}, {}], [2, None, "cpu:0"])
    assert_close(outs, [l1(x), 2 * l2.layer(x), x.sin()])
    compat.parallel_apply(nn.ModuleList([l1, l2.layer]), [x, x])[1].sum().backward()
    assert l1.weight.grad is None
    assert l2.layer.weight.grad is not None


def test_lengths_that_disagree_are_refused():
    module, x = mlp(), rand(2, 3)
    with pytest.raises(
        ValueError, match=r"parallel_apply: 2 modules and 1 inputs\.\nGive one input per module"
    ):
        compat.parallel_apply([module, module], [x])
    with pytest.raises(ValueError, match=r"parallel_apply: there are more inputs than the 1 kwargs_tup"):
        compat.parallel_apply([module, module], [x, x], [{}])
    with pytest.raises(ValueError, match=r"parallel_apply: there are more kwargs_tup than the 2 inputs"):
        compat.parallel_apply([module, module], [x, x], [{}, {}, {}])
    with pytest.raises(
        ValueError, match=r"parallel_apply: 2 modules and 1 devices\.\nGive one device per module"
    ):
        compat.parallel_apply([module, module], [x, x], devices=[0])


def test_inputs_and_modules_of_the_wrong_kind_are_refused_with_the_right_call():
    with pytest.raises(
        TypeError,
        match=r"inputs is a Tensor, not a list of inputs\.\nCut it first: parallel_apply\(modules, scatter",
    ):
        compat.parallel_apply(mlp(), rand(4, 3))
    with pytest.raises(TypeError, match=r"parallel_apply: modules is a int\.\nGive a module"):
        compat.parallel_apply(3, [rand(4, 3)])
    outputs, targets = [rand(3, 2)] * 2, [torch.tensor([0, 1, 1])] * 2
    message = (
        r"\[0\] is a Tensor, not a dict\.\nA criterion takes pairs: parallel_apply\(criterion, list\(zip\("
    )
    with pytest.raises(TypeError, match=message):
        compat.parallel_apply(nn.CrossEntropyLoss(), outputs, targets)
    assert len(compat.parallel_apply(nn.CrossEntropyLoss(), list(zip(outputs, targets, strict=True)))) == 2


def test_a_method_of_a_module_runs_on_replicas_as_the_module_does():
    class Coder(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3).double()

        def encode(self, x):
            return self.norm(x)

    module = Coder()
    pieces = compat.scatter(rand(8, 3), [0, 1])
    outs = compat.parallel_apply(module.encode, pieces, devices=[0, 1])
    assert_close(module.norm.running_mean, 0.1 * pieces[0].mean(0))
    torch.cat(outs).square().sum().backward()
    assert module.norm.weight.grad is not None
