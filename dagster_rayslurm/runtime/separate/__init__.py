"""The runtime's side of `topology="separate"`: a payload and a Ray cluster for each component. Begin with `participant`."""
