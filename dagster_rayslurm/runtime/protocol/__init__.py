"""The data that Dagster's side and the runtime exchange.

Start records (`spec`), the run record (`record`), messages and their types (`messages`), connections for them (`rpc`), and a
relay for connections to ports of a node (`relay`).
"""
