#!/bin/bash
# `ray symmetric-run` on all nodes of a job: it starts Ray, waits for the nodes, runs the payload on the first and stops Ray.
# No dashboard and a small object store, as with all others here; only the head may be told of a dashboard.
PATH=$(dirname "$BENCH_PYTHON"):$PATH
address=$(hostname --ip-address):6379
export address
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=120  # Its own 30 s are not enough for a busy machine.
srun "--nodes=$SLURM_JOB_NUM_NODES" "--ntasks=$SLURM_JOB_NUM_NODES" --cpu-bind=none --output=ray-%n.log bash -c '
    common=(--num-cpus=2 --num-gpus=0 --object-store-memory=107374182 --disable-usage-stats)
    [ "$SLURM_NODEID" != 0 ] || common+=(--include-dashboard=false)
    exec ray symmetric-run "--address=$address" "--min-nodes=$SLURM_JOB_NUM_NODES" "${common[@]}" -- \
        env "RAY_ADDRESS=$address" "$BENCH_PYTHON" "$BENCH_SCRIPTS/marks.py"'
echo $? > ended
