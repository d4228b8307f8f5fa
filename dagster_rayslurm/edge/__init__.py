"""Functions that run on the edge node, and the agent that runs the functions for a client.

`Connection.call` takes a function of this package. Without SSH, `Connection.call` runs the function in this process. The modules
import only the standard library and each other. The modules work with Python 3.6, because the login node's own Python runs the
agent.
"""
