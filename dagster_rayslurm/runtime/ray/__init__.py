"""One Ray cluster: start, watch, check for leaks."""
