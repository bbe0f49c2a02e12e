"""What a pmapped call and a pmapped training step cost: ``python -m benchmarks``."""
