"""The data that Dagster's side and the runtime exchange.

The modules define start records (`spec`), the run record (`record`), messages (`messages`), connections for messages (`rpc`), and
a relay that forwards connections to ports of a node (`relay`).
"""
