"""A simulator: real code of this package under virtual time, with faults drawn from a seed.

`world` runs simulated processes as greenlets, one at a time, and replaces the clock. `cluster` is the edge node, slurmctld and
the shared file system. A `history` is one run of a scenario with one seed; the same seed gives the same history. `scenarios`
names the scenarios. Run `python -m tests.simulation --help`.
"""
