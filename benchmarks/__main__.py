"""``python -m benchmarks``: see ``command``."""

from benchmarks.command import main

if __name__ == "__main__":
    main()
