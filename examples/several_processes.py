"""Train in several processes, with checkpoints: the same program alone, under torchrun, and after a crash.

    python examples/several_processes.py
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --standalone --nproc-per-node 2 --max-restarts 2 \\
        examples/several_processes.py --checkpoint run.pt --crash-at 25

The second command kills one of its processes in step 25. torchrun starts all again, they go on from the
last checkpoint, and end with the parameters of a run that nothing disturbed. (The variable gives them a new
store to meet in: the one they share with torchrun would still hold the addresses of the processes before.)
"""

import argparse
import os
import signal
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import funcpar as fp

ROWS_PER_STEP = 128


def batch_of(step: int, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return this process's rows of a step's batch: the batch depends on the step alone."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(step))[:ROWS_PER_STEP]
    mine = order.tensor_split(fp.distributed.process_count())[fp.distributed.process_index()]
    return inputs[mine], labels[mine]


def save(path: Path, state: dict) -> None:
    """Write a checkpoint in one process, whole or not at all."""
    if fp.distributed.process_index() == 0:
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)


def load(path: Path, state: dict) -> dict:
    """Return process 0's checkpoint, or the state that all begin with, in every process."""
    if fp.distributed.process_index() == 0 and path.exists():
        state = torch.load(path)
    return fp.distributed.broadcast(state)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--devices", type=int, help="virtual CPU devices of each process")
    parser.add_argument("--checkpoint", type=Path, help="file to go on from, and to write every 10 steps")
    parser.add_argument("--crash-at", type=int, help="kill the last process in this step, the first time")
    parser.add_argument("--result", type=Path, help="file for the parameters")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    fp.distributed.initialize(timeout=60)
    index, count = fp.distributed.process_index(), fp.distributed.process_count()
    if args.devices:
        fp.set_cpu_devices(args.devices)
    if index == 0:
        print(__doc__.splitlines()[0])
        print(f"Devices: {', '.join(map(str, fp.devices()))} in each of {count} processes")
    digits = load_digits()
    inputs, labels = torch.tensor(digits.data) / 16, torch.tensor(digits.target)

    torch.manual_seed(0)
    apply, params = fp.functionalize(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)).double())
    optimizer = torch.optim.AdamW(params.values(), lr=0.01)
    for param in params.values():  # AdamW makes its state at the first step; a checkpoint needs it before.
        param.grad = torch.zeros_like(param)
    optimizer.step()
    with tempfile.TemporaryDirectory() as directory:
        path = args.checkpoint or Path(directory, "run.pt")
        state = load(path, {"step": 0, "params": params, "optimizer": optimizer.state_dict()})
        for name, param in params.items():
            param.copy_(state["params"][name])
        optimizer.load_state_dict(state["optimizer"])

        step_of = fp.pmap(fp.value_and_grad(lambda params, x, y: F.cross_entropy(apply(params, x), y)))
        for step in range(state["step"], args.steps):
            first_time = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
            if step == args.crash_at and first_time and index == count - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            loss, grads = step_of(params, *batch_of(step, inputs, labels))
            for name, param in params.items():
                param.grad = grads[name]
            optimizer.step()
            if (step + 1) % 10 == 0:
                save(path, {"step": step + 1, "params": params, "optimizer": optimizer.state_dict()})
    if index == 0:
        accuracy = (apply(params, inputs).argmax(1) == labels).double().mean()
        steps = f"steps {state['step']} to {args.steps}"
        print(f"{count} processes: {steps}, loss {loss:.4f}, accuracy {accuracy:.2%}")
        if args.result:
            torch.save(params, args.result)
    fp.distributed.shutdown()


if __name__ == "__main__":
    main()
