"""Small Dagster modules, one for each pattern of Ray on Slurm, to copy from; docs/examples.md lists them."""
