"""What Dagster's side and the runtimes exchange: start records (what to run), the run record (what happens), RPC messages.

It defines messages, files and connections, and takes no decisions. Begin with `spec` for the start records and `record` for the
run record.
"""
