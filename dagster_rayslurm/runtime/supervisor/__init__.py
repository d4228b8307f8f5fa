"""The head's runtime: queue, clusters, requests, shutdown."""
