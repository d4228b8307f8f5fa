"""The separate topology: components start together and fail together."""
