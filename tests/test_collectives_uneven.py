"""Collectives on uneven shards, in training steps, and in memory that nobody else writes to."""

import pytest
import torch
from torch import Tensor

import funcpar as fp
from funcpar import tree

LARGE = (1 << 15) + 7


@pytest.mark.parametrize("num_rows", [1, 3, 4, 7, 13])
def test_pmean_is_weighted_by_rows(devices, num_rows: int):
    x = torch.linspace(-1, 2, num_rows * 3, dtype=torch.float64).reshape(num_rows, 3)
    seen = []

    def body(x: Tensor) -> Tensor:
        seen.append(fp.axis_size())
        return fp.pmean(x.mean(0))

    found = fp.pmap(body, in_axes=0, out_axes=None)(x)
    torch.testing.assert_close(found, x.mean(0), rtol=1e-12, atol=1e-12)
    assert set(seen) == {min(len(devices), num_rows)}


def test_zero_rows_run_once_and_collectives_see_one_shard(devices):
    body = lambda x: (fp.psum(x.sum()), fp.axis_size(), fp.all_gather(x, tiled=True))
    total, size, rows = fp.pmap(body, in_axes=0)(torch.ones(0, 2))
    assert (total.item(), size, rows.shape) == (0.0, 1, (0, 2))


def test_pmean_takes_the_weights_of_the_call(devices):
    x = torch.arange(8.0, dtype=torch.float64)
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 1, 0], dtype=torch.float64)
    mean = lambda x, mask: fp.pmean((x * mask).sum() / mask.sum())
    mapped = fp.pmap(mean, in_axes=0, out_axes=None, weight=lambda x, mask: mask.sum())
    torch.testing.assert_close(mapped(x, mask), (x * mask).sum() / mask.sum(), rtol=1e-12, atol=0)


def test_a_shard_of_weight_zero_poisons_no_mean():
    x = torch.tensor([1.0, 2.0, 4.0, 8.0], requires_grad=True)
    mask = torch.tensor([1.0, 0.0, 1.0, 0.0])

    def loss(x: Tensor, mask: Tensor) -> Tensor:
        mine = (x * mask).sum() / mask.sum()  # 0/0 where nothing counts.
        return fp.pmean(mine) ** 2

    weigh = {"in_axes": 0, "weight": lambda x, mask: mask.sum()}
    mapped = fp.pmap(loss, out_axes=None, **weigh)
    assert mapped(x, mask).item() == 6.25
    value, grads = fp.pmap(fp.value_and_grad(loss), **weigh)(x, mask)
    assert value.item() == 6.25
    assert grads.tolist() == [2.5, 0.0, 2.5, 0.0]
    assert torch.autograd.grad(mapped(x, mask), x)[0].tolist() == [2.5, 0.0, 2.5, 0.0]
    assert torch.func.grad(mapped)(x.detach(), mask).tolist() == [2.5, 0.0, 2.5, 0.0]


def test_pmean_within_groups_is_weighted_within_them():
    x = torch.arange(7.0)  # Shards of 2, 2, 2 and 1 rows.
    body = lambda x: fp.pmean(x.mean(), axis_index_groups=[[0, 3], [1, 2]]).expand(len(x))
    outer = (0 + 1 + 6) / 3
    assert fp.pmap(body, in_axes=0, out_axes=0)(x).tolist() == pytest.approx(
        [outer] * 2 + [3.5] * 4 + [outer]
    )


def test_shards_of_different_sizes_cannot_be_gathered():
    with pytest.raises(
        fp.ReplicaMismatchError, match=r"all_gather\(float32\[2\].*\n.*all_gather\(float32\[1\]"
    ):
        fp.pmap(fp.all_gather, in_axes=0, devices=2)(torch.ones(3))


def _model(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
    return (((x @ params["w1"] + params["b1"]).tanh() @ params["w2"] - y) ** 2).mean()


@pytest.mark.parametrize("num_rows", [3, 8, 13])
def test_a_training_step_that_averages_gradients_inside_equals_one_device(devices, num_rows: int):
    def step(params: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        loss, grads = fp.value_and_grad(_model)(params, x, y)
        loss, grads = fp.pmean((loss, grads), "batch")
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    def plain_step(params: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        loss, grads = fp.value_and_grad(_model)(params, x, y)
        return tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    shapes = {"w1": (3, 5), "b1": (5,), "w2": (5, 2)}
    start = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    x, y = torch.randn(num_rows, 3, dtype=torch.float64), torch.randn(num_rows, 2, dtype=torch.float64)
    mapped = fp.pmap(step, "batch", out_axes=None)
    mine = theirs = start
    for _ in range(10):
        mine, loss = mapped(mine, x, y)
        theirs, expected = plain_step(theirs, x, y)
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for name, first in start.items():
        torch.testing.assert_close(mine[name] - first, theirs[name] - first, rtol=1e-10, atol=1e-12)


def test_a_leaf_that_is_not_equal_on_all_shards_is_named():
    def body(x: Tensor) -> dict[str, Tensor]:
        total = fp.psum(x.sum())
        return {"same": total, "other": total + (fp.axis_index() == 2)}

    with pytest.raises(
        fp.ReplicaMismatchError,
        match=r"output\['other'\] was promised equal on all shards and is not.*\(shard 2 from shard 0\)",
    ):
        fp.pmap(body, in_axes=0, out_axes=None)(torch.ones(4))


@pytest.mark.parametrize("num_entries", [3, LARGE])
@pytest.mark.parametrize(
    "name", ["psum", "pmean", "pmax", "all_gather", "ppermute", "pshuffle", "pbroadcast"]
)
@pytest.mark.parametrize("records", [False, True], ids=["values", "gradients"])
def test_writing_in_place_after_a_collective_disturbs_no_one(name: str, num_entries: int, records: bool):
    options = {"ppermute": {"perm": [(0, 1), (1, 2), (2, 3), (3, 0)]}, "pshuffle": {"perm": [3, 2, 1, 0]}}
    call = lambda x: getattr(fp, name)(x, **options.get(name, {}))
    start = torch.arange(4.0)[:, None].repeat(1, num_entries)
    expected = fp.pmap(lambda x: call(x[0])[None], in_axes=0, out_axes=0)(start)
    assert torch.equal(start, torch.arange(4.0)[:, None].expand_as(start))

    def body(x: Tensor) -> Tensor:
        kept, rank = [], fp.axis_index()
        x = (x[0] * 1).requires_grad_(records) * 1
        for _ in range(3):
            out = call(x)
            kept.append(out.detach().clone())
            with torch.no_grad():
                x += 100 + rank  # The operand, at once,
                out.mul_(-1 - rank)  # and the result.
                call(torch.zeros(2, 2))  # Others may be anywhere by now.
                x -= 100 + rank
            if rank == 1:
                torch.full((num_entries,), 7.0).sum()
        assert all(torch.equal(one, kept[0]) for one in kept)
        return kept[0][None]

    with torch.set_grad_enabled(records):
        found = fp.pmap(body, in_axes=0, out_axes=0)(start)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("num_entries", [3, LARGE])
@pytest.mark.parametrize("name", ["psum_scatter", "all_to_all", "pswapaxes"])
def test_writing_in_place_after_parts_were_dealt_disturbs_no_one(name: str, num_entries: int):
    call = getattr(fp, name)
    start = torch.arange(16.0).reshape(4, 4, 1).repeat(1, 1, num_entries)
    expected = fp.pmap(lambda x: call(x[0])[None], in_axes=0, out_axes=0)(start)

    def body(x: Tensor) -> Tensor:
        x = x[0].clone()
        for _ in range(3):
            out = call(x)
            found = out.clone()
            x.zero_()
            out.fill_(fp.axis_index())
            x += torch.arange(4.0)[:, None] + 4 * fp.axis_index()
        return found[None]

    assert torch.equal(fp.pmap(body, in_axes=0, out_axes=0)(start), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("num_entries", [5, LARGE])
def test_a_reduction_is_bitwise_equal_on_all_shards_and_every_time(
    devices, num_entries: int, dtype: torch.dtype
):
    x = torch.randn(len(devices), num_entries, dtype=dtype)
    mapped = fp.pmap(
        lambda x: tree.map(lambda leaf: leaf[None], (fp.psum(x[0]), fp.pmean(x[0]), fp.psum_scatter(
            x[0].expand(fp.axis_size(), -1)))), in_axes=0, out_axes=0,
    )  # fmt: skip
    first, again = mapped(x), mapped(x)
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
        assert all(torch.equal(row, one[0]) for row in one)


@pytest.mark.parametrize("num_entries", [3, LARGE])
def test_results_own_their_memory_on_every_number_of_shards(devices, num_entries: int):
    x = torch.ones(len(devices), num_entries)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        mine = x[0]
        outs = (
            fp.psum(mine),
            fp.pmean(mine),
            fp.pmax(mine),
            fp.pbroadcast(mine),
            fp.all_gather(mine, tiled=True),
        )
        for out in outs:
            out.add_(1)
        assert torch.equal(mine, torch.ones(num_entries))
        return tuple(out[:2] for out in outs)

    fp.pmap(body, in_axes=0, out_axes=None)(x)
    assert torch.equal(x, torch.ones_like(x))


def test_an_operand_may_be_expanded_transposed_or_overlapping():
    base = torch.arange(12.0).reshape(3, 4)

    def body(x: Tensor) -> tuple[Tensor, ...]:
        wide = torch.ones(1).expand(LARGE)
        tall = torch.arange(2.0 * LARGE).reshape(2, LARGE).mT
        windows = torch.arange(float(LARGE)).unfold(0, 5, 1)
        return fp.psum(wide), fp.psum(tall), fp.psum(windows), fp.psum(base.mT), fp.psum(base[:, ::2])

    found = fp.pmap(body, in_axes=0, out_axes=None)(torch.ones(4))
    assert torch.equal(found[0], torch.full((LARGE,), 4.0))
    assert torch.equal(found[1], 4 * torch.arange(2.0 * LARGE).reshape(2, LARGE).mT)
    assert torch.equal(found[2], 4 * torch.arange(float(LARGE)).unfold(0, 5, 1))
    assert torch.equal(found[3], 4 * base.mT)
    assert torch.equal(found[4], 4 * base[:, ::2])


def test_gradients_of_a_large_sum_share_no_memory():
    x = torch.ones(4, LARGE)

    def body(x: Tensor) -> Tensor:
        grad = fp.grad(lambda a: fp.psum(a).sum() + fp.psum(a * 2).mean())(x[0])
        grad *= fp.axis_index() + 1
        return grad[None]

    found = fp.pmap(body, in_axes=0, out_axes=0)(x)
    torch.testing.assert_close(found, (4 + 8 / LARGE) * torch.arange(1.0, 5)[:, None].expand_as(x))
