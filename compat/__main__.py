"""The command that runs a program on compat's names in the place of torch's.

python -m compat script.py args...
python -m compat -m module args...
python -m compat --devices 4 script.py args...    with 4 virtual CPU devices
"""

from __future__ import annotations

import argparse
import importlib.util
import io
import runpy
import sys
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

import compat
import funcpar as fp


def main() -> None:
    """Run the command."""
    devices, module, rest = _parse(sys.argv[1:])
    if devices is not None:
        fp.set_cpu_devices(devices)
    compat.install()
    if module is None:
        _run_script(rest)
    else:
        _run_module(module, rest)


def _run_script(arguments: list[str]) -> None:
    sys.argv = arguments
    path = Path(arguments[0]).resolve()
    if not path.exists():
        raise SystemExit(
            f"python -m compat: there is no {arguments[0]}.\nName a script, or a module with -m."
        )
    if not path.is_file() or path.suffix not in (".py", ".pyw", ""):
        runpy.run_path(arguments[0], run_name="__main__")  # A folder, an archive, or nothing at all.
        return
    if not sys.flags.safe_path:
        sys.path[0] = str(path.parent)
    name = str(Path(arguments[0]).absolute())
    with io.open_code(name) as file:
        code = compile(file.read(), name, "exec", dont_inherit=True)
    _run_code(code, __file__=name, __loader__=SourceFileLoader("__main__", name))


def _run_module(name: str, arguments: list[str]) -> None:
    sys.argv = ["-m", *arguments]
    spec = _spec_of(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _spec_of(f"{name}.__main__")
    code = None if spec is None else spec.loader.get_code(spec.name)  # type: ignore[union-attr]
    if spec is None or code is None:
        raise SystemExit(
            f"python -m compat: there is no module {name!r} to run.\nName one that can be imported."
        )
    sys.argv[0] = str(spec.origin)
    _run_code(code, __file__=spec.origin, __loader__=spec.loader, __spec__=spec, __package__=spec.parent)


def _spec_of(name: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if name.startswith(str(error.name)):
            return None
        raise


def _run_code(code: types.CodeType, **names: Any) -> None:
    # It stays the main module: threads, pickles and functions called at exit look there.
    program = types.ModuleType("__main__")
    program.__dict__.update(names, __builtins__=__builtins__)
    sys.modules["__main__"] = program
    exec(code, program.__dict__)


def _parse(arguments: list[str]) -> tuple[int | None, str | None, list[str]]:
    """Return the number of devices, the module or None, and the program's own arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m compat",
        usage="%(prog)s [--devices N] [-m module | script.py] args...",
        description="Run a program on compat's names in the place of those of torch.nn.parallel.",
        allow_abbrev=False,
    )
    parser.add_argument("--devices", type=int, metavar="N", help="make N virtual CPU devices")
    # What follows the program's name is the program's.
    count = 0
    while count < len(arguments) and arguments[count].startswith("-") and arguments[count][:2] != "-m":
        count += 2 if arguments[count] == "--devices" else 1
        if arguments[count - 1] == "--":
            break
    devices = parser.parse_args([one for one in arguments[:count] if one != "--"]).devices
    rest = arguments[count:]
    module = None
    if rest and rest[0].startswith("-m") and arguments[count - 1 : count] != ["--"]:
        given = rest[0].removeprefix("-m")
        rest = [given, *rest[1:]] if given else rest[1:]
        module, rest = (rest[0], rest[1:]) if rest else (None, [])
    if module is None and not rest:
        parser.error("name a script, or a module with -m")
    if devices is not None and devices < 1:
        parser.error(f"--devices {devices}: give 1 or more")
    return devices, module, rest


if __name__ == "__main__":
    main()
