"""The runtime on the first node: takes requests, queues payloads, starts their Ray clusters, and decides when to end."""
