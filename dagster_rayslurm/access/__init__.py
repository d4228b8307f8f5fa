"""Access to a running Ray cluster from this machine: an HTTP proxy that adds Ray's token, and a stream to the head node.

Begin with `proxy.Proxy`, which serves HTTP on the loopback address. `head.Head` keeps the stream to a relay, a process on the
head node that opens connections there, and `find` chooses the cluster by name.
"""
