"""install and uninstall, and the command that runs an unmodified program."""

import os
import runpy
import subprocess
import sys
import textwrap
import types
from pathlib import Path
from typing import Any

import processes
import pytest
import torch

import compat
from compat.__main__ import main

ROOT = Path(compat.__file__).parent.parent
SCRIPT = """
    import sys
    import threading
    import torch
    from torch import nn
    from torch.nn import DataParallel

    class Net(nn.Module):
        threads = set()

        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

        def forward(self, x):
            self.threads.add(threading.get_ident())
            return self.layers(x)

    torch.manual_seed(0)
    net = DataParallel(Net())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(10, 4)
    for step in range(5):
        optimizer.zero_grad()
        loss = (net(x) - x[:, :1]).square().mean()
        loss.backward()
        optimizer.step()
        print(f"{loss.item():.4f}")
    print("threads", len(Net.threads), "name", __name__, "arguments", sys.argv[1:])
"""


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


@pytest.fixture
def user_module():
    """A module that imported the names before anything was installed."""
    module = types.ModuleType("somebodys_code")
    sys.modules[module.__name__] = module
    code = """
        import torch
        from torch.nn import DataParallel as DP
        from torch.nn.parallel import data_parallel, parallel_apply, replicate, scatter
        from torch.nn.parallel.scatter_gather import gather, scatter_kwargs
        class Derived(DP):
            pass
    """
    exec(textwrap.dedent(code), module.__dict__)
    yield module
    del sys.modules[module.__name__]


def test_every_name_of_torch_is_replaced_in_packages_and_submodules(installed):
    parallel = torch.nn.parallel
    for name in ("DataParallel", "data_parallel", "parallel_apply", "replicate", "scatter", "gather"):
        assert getattr(parallel, name) is getattr(compat, name)
    assert torch.nn.DataParallel is compat.DataParallel
    for name in ("data_parallel", "parallel_apply", "replicate"):
        assert getattr(sys.modules[f"torch.nn.parallel.{name}"], name) is getattr(compat, name)
    for name in ("scatter", "scatter_kwargs", "gather"):
        assert getattr(sys.modules["torch.nn.parallel.scatter_gather"], name) is getattr(compat, name)


def test_uninstall_puts_everything_back_and_twice_does_nothing():
    before = {name: getattr(torch.nn.parallel, name) for name in torch.nn.parallel.__all__}
    for _ in range(2):
        compat.install()
    for _ in range(2):
        compat.uninstall()
    assert before == {name: getattr(torch.nn.parallel, name) for name in torch.nn.parallel.__all__}
    assert torch.nn.DataParallel is not compat.DataParallel
    assert compat.DataParallel.__mro__[1] is torch.nn.DataParallel


def test_names_imported_before_and_classes_derived_before_are_replaced_too(user_module):
    original = user_module.DP
    compat.install()
    try:
        assert user_module.DP is compat.DataParallel
        for name in ("data_parallel", "parallel_apply", "replicate", "scatter", "scatter_kwargs", "gather"):
            assert getattr(user_module, name) is getattr(compat, name)
        wrapper = user_module.Derived(torch.nn.Linear(3, 2))
        assert wrapper.device_ids == [0, 1, 2, 3]
        assert wrapper(torch.ones(5, 3)).shape == (5, 2)
    finally:
        compat.uninstall()
    assert user_module.DP is original is torch.nn.DataParallel
    assert user_module.Derived.__bases__ == (original,)
    assert user_module.parallel_apply is torch.nn.parallel.parallel_apply


def test_a_class_that_cannot_be_given_another_base_is_named():
    class Mixed(torch.nn.DataParallel, torch.nn.Module):
        pass

    class Stubborn(type):
        def __setattr__(cls, name, value):
            if name == "__bases__":
                raise TypeError("no")
            super().__setattr__(name, value)

    class Fixed(torch.nn.DataParallel, metaclass=Stubborn):
        pass

    try:
        with pytest.raises(
            RuntimeError, match=r"Fixed derives from torch's DataParallel already, and cannot be given"
        ):
            compat.install()
        assert Mixed.__bases__[0] is torch.nn.DataParallel is not compat.DataParallel
    finally:
        compat.uninstall()
        type.__setattr__(Fixed, "__bases__", (torch.nn.Module,))


def run(*arguments: str, cwd: Path, started_by: Any = processes.program) -> list[str]:
    done = started_by("-m", "compat", *arguments, cwd=cwd, FUNCPAR_CPU_DEVICES="3")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def python(*words: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", *words],
        cwd=cwd, env={**os.environ, "PYTHONPATH": str(ROOT), **env}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_an_unmodified_script_has_the_same_losses_on_all_devices(tmp_path, capsys, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "3"])
    runpy.run_path(str(script), run_name="__main__")
    *losses, last = capsys.readouterr().out.splitlines()
    assert len(losses) == 5
    assert last == "threads 1 name __main__ arguments ['--lr', '3']"
    ours = run("train.py", "--lr", "3", cwd=tmp_path)
    assert ours == [*losses, "threads 3 name __main__ arguments ['--lr', '3']"]
    ours = run("--devices", "2", "-m", "train", "-x", cwd=tmp_path)
    assert ours == [*losses, "threads 2 name __main__ arguments ['-x']"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [([], "name a script, or a module with -m"), (["--devices", "0", "x.py"], "--devices 0: give 1 or more")],
)
def test_the_command_says_what_is_missing(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compat", *arguments])
    with pytest.raises(SystemExit, match=r"2"):
        main()
    assert message in capsys.readouterr().err


PROGRAM = """
    import atexit, pickle, sys
    from pathlib import Path

    class Local:
        pass

    def last():
        print(type(pickle.loads(pickle.dumps(Local()))) is Local, sys.modules["__main__"].Local is Local)

    atexit.register(last)
    print(Path(__file__).is_absolute(), Path(__file__).name, __name__, sys.path[0], sys.argv[1:])
"""


def test_a_program_finds_the_world_as_under_plain_python(tmp_path):
    package = tmp_path / "pkg"
    package.mkdir()
    for name, text in (("__init__", ""), ("__main__", PROGRAM), ("a", PROGRAM)):
        (package / f"{name}.py").write_text(textwrap.dedent(text))
    for arguments, name in (
        (["-m", "pkg.a", "--x", "1", "--", "y"], "a.py"),
        (["-mpkg.a", "1", "2"], "a.py"),
        (["--devices", "2", "-m", "pkg", "-m", "x"], "__main__.py"),
        (["--devices=2", "pkg/a.py", "--devices", "3", "-mx"], "a.py"),
        (["--", "pkg/a.py", "--", "-h"], "a.py"),
    ):
        after = next(k for k, one in enumerate(arguments) if "pkg" in one) + 1
        path = package if "pkg/a.py" in arguments else tmp_path
        # Once by Python itself: the others start in processes that have torch already.
        started_by = python if name == "__main__.py" else processes.program
        out = run(*arguments, cwd=tmp_path, started_by=started_by)
        assert out == [f"True {name} __main__ {path} {arguments[after:]}", "True True"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-m", "no_such_module.at_all"], r"there is no module 'no_such_module\.at_all' to run"),
        (["no_such_script.py"], r"there is no no_such_script\.py\.\nName a script"),
    ],
)
def test_a_program_that_is_not_there_is_named(monkeypatch, arguments, message):
    monkeypatch.setattr(sys, "argv", ["compat", *arguments])
    try:
        with pytest.raises(SystemExit, match=message):
            main()
    finally:
        compat.uninstall()
