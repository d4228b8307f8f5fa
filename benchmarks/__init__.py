"""Figures of this package, each measured beside doing the same by hand: `python -m benchmarks`."""
