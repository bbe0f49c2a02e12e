"""Run the tests of random numbers on accelerators on the simulated one, without LSTMs and GRUs."""

import sys
from pathlib import Path

import pytest
import simulated_common  # noqa: F401 (the accelerator of this process)

FILE = Path(__file__).parent / "test_gpu_random.py"

if __name__ == "__main__":
    sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not LSTM and not GRU", str(FILE)]))
