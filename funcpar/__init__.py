"""Data parallelism for PyTorch that is a function."""
