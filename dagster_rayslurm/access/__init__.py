"""The way in to a Ray cluster that runs: a stream to a relay on its head, and a proxy on this machine that knows its token.

Begin with `proxy.Proxy`, which serves HTTP on the loopback address; `head.Head` keeps the stream, and `find` finds the cluster.
"""
