"""What runtimes and the Dagster host exchange: start records, run records, RPC."""
