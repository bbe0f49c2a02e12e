"""The command that runs a program on compat's names in the place of torch's.

python -m compat script.py args...
python -m compat -m module args...
python -m compat --devices 4 script.py args...    with 4 virtual CPU devices
"""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

import compat
import funcpar as fp


def main() -> None:
    """Run the command."""
    options = _parse(sys.argv[1:])
    if options.devices is not None:
        fp.set_cpu_devices(options.devices)
    compat.install()
    if options.module is not None:
        sys.argv = [options.module, *options.rest]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(options.module, run_name="__main__", alter_sys=True)
        return
    sys.argv = options.rest
    sys.path[0:0] = [str(Path(options.rest[0]).resolve().parent)]
    runpy.run_path(options.rest[0], run_name="__main__")


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m compat",
        usage="%(prog)s [--devices N] [-m module | script.py] args...",
        description="Run a program on compat's names in the place of those of torch.nn.parallel.",
    )
    parser.add_argument("--devices", type=int, metavar="N", help="make N virtual CPU devices")
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, help="run a module, as python -m does")
    parser.add_argument("rest", nargs=argparse.REMAINDER, help="the script and its arguments")
    options = parser.parse_args(arguments)
    if options.module:
        options.module, options.rest = options.module[0], options.module[1:]
    elif not options.rest:
        parser.error("name a script, or a module with -m")
    if options.devices is not None and options.devices < 1:
        parser.error(f"--devices {options.devices}: give 1 or more")
    return options


if __name__ == "__main__":
    main()
