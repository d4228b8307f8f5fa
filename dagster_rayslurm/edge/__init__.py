"""Functions that run on the edge node. With SSH, a process on the edge node runs these functions: the agent (`agent`).

`Connection.call` takes a function of this package. With SSH, the agent runs the function; without SSH, Dagster's process runs the
function itself. The modules import only the standard library and each other. The modules work with Python 3.6, because the edge
node's own Python runs the agent.
"""
