"""Backends start the runtime: as a local process, in a batch job, or in a warm session. Execution is the same for all."""
