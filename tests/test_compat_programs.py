"""The programs people write with torch.nn.parallel, from end to end, beside the plain module."""

import pytest
import torch
from compat_models import assert_close, assert_same_gradients, classifier, mlp, pair, rand
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import compat

CRITERION = nn.CrossEntropyLoss()


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return rand(rows, 3, 8, 8), torch.randint(5, (rows,))


def changes(module: nn.Module, start: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [param.detach() - start[name] for name, param in module.named_parameters()]


def test_a_classifier_trains_as_the_plain_one():
    module, plain = pair(lambda: classifier().eval())
    start = {name: param.detach().clone() for name, param in module.named_parameters()}
    wrapper = compat.DataParallel(module, device_ids=[0, 1, 2, 3])
    for net, model in ((wrapper, module), (plain, plain)):
        torch.manual_seed(1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(5):
            x, y = images(13)
            optimizer.zero_grad()
            CRITERION(net(x), y).backward()
            optimizer.step()
        assert any(change.abs().max() > 1e-3 for change in changes(model, start))
    assert_close(changes(module, start), changes(plain, start))


def test_one_model_over_a_data_loader_gives_one_output_per_batch_in_order():
    module, (x, _) = mlp(), (rand(23, 3), None)
    outs = compat.parallel_apply(module, DataLoader(TensorDataset(x), batch_size=2))
    assert [len(out) for out in outs] == [2] * 11 + [1]
    assert_close(torch.cat(outs), module(x))


def test_no_more_batches_are_in_flight_than_there_are_devices():
    taken, done = [], []

    def batches():
        for k in range(10):
            assert k - len(done) < 4
            taken.append(k)
            yield torch.tensor(k)

    def work(x):
        done.append(int(x))
        return x + 0

    assert [int(out) for out in compat.parallel_apply(work, batches())] == list(range(10)) == taken


def test_scatter_one_module_for_all_chunks_a_criterion_for_pairs_backward_and_step():
    module, plain = pair(mlp)
    optimizer, other = (
        torch.optim.SGD(module.parameters(), lr=0.1),
        torch.optim.SGD(plain.parameters(), lr=0.1),
    )
    data, target = rand(8, 3), torch.randint(2, (8,))
    inputs, targets = compat.scatter(data, devices=[0, 1]), compat.scatter(target, devices=[0, 1])
    outputs = compat.parallel_apply(module, inputs, devices=[0, 1])
    losses = compat.parallel_apply(CRITERION, list(zip(outputs, targets, strict=True)))
    loss = compat.gather(losses, "cpu").mean()
    expected = CRITERION(plain(data), target)
    assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert_same_gradients(module, plain)
    optimizer.step()
    other.step()
    assert_close(list(module.parameters()), list(plain.parameters()))


def test_one_module_four_times_is_one_module():
    module, plain = pair(classifier)
    x, _ = images(8)
    inputs = compat.scatter(x, [0, 1, 2, 3])
    outs = compat.parallel_apply([module] * 4, inputs, devices=[0, 1, 2, 3])
    assert_close(outs[0], plain(inputs[0]))
    assert_close(dict(module.named_buffers()), dict(plain.named_buffers()))
    plain.zero_grad()
    torch.cat(outs).square().sum().backward()
    sum(plain(piece).square().sum() for piece in inputs).backward()
    assert_same_gradients(module, plain)


def test_four_rows_on_three_devices():
    module, x = mlp(), rand(4, 3)
    assert_close(compat.data_parallel(module, x, device_ids=[0, 1, 2]), module(x))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_momentum_workers_and_progress(capsys):
    module, plain = pair(
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(3600, 10))
    )
    data = TensorDataset(torch.randn(26, 3, 32, 32), torch.randint(10, (26,)))
    losses = []
    for net in (compat.DataParallel(module), plain):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
        running = []
        for step, (x, y) in enumerate(DataLoader(data, batch_size=8, num_workers=2)):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            running.append(loss.item())
            print(f"[{step + 1}] loss: {loss.item():.3f}")
        losses.append(running)
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:4] == lines[4:]


def test_a_gan_trains_two_wrappers_against_each_other():
    results = []
    for wrap in (compat.DataParallel, lambda module: module):
        torch.manual_seed(2)
        make, judge = nn.Linear(2, 3).double(), nn.Linear(3, 1).double()
        generator, discriminator = wrap(make), wrap(judge)
        for _ in range(3):
            noise, real = rand(9, 2), rand(9, 3)
            fake = generator(noise)
            scores = [F.softplus(-discriminator(real)), F.softplus(discriminator(fake.detach()))]
            torch.cat(scores).mean().backward()
            F.softplus(-discriminator(fake)).mean().backward()
            with torch.no_grad():
                for param in (*make.parameters(), *judge.parameters()):
                    param.sub_(0.1 * param.grad)
                    param.grad = None
        results.append([*make.parameters(), *judge.parameters()])
    assert_close(*results)
