"""The runtime's part of `topology="separate"`: each component has its own payload and Ray cluster. Begin with `participant`."""
