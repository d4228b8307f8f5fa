"""Small Dagster modules, one for each pattern of Ray on Slurm, to copy from; `README.md` lists them."""
