"""Connects this machine to a running Ray cluster, by an HTTP proxy and a stream to the head node.

Begin with `proxy.Proxy`, an HTTP server on the loopback address that adds Ray's token to each request. `head.Head` keeps a stream
open to a relay, a process on the head node that opens connections to ports of the head node. `find` chooses the cluster by name.
"""
