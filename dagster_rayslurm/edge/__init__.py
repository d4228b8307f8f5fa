"""Functions that run on the edge node, and the agent that runs them there for a client.

`Connection.call` takes a function of this package. Without SSH it calls the function in this process. The modules import the
standard library and each other only, and work with Python 3.6, because the login node's own Python runs them.
"""
