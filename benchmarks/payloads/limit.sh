#!/bin/bash
# What a person would write for one payload: Ray on all nodes at once, the payload when all are alive, and then the end.
if [ "$BENCH_RAY" = 1 ]; then
    temp=/tmp/bench-$SLURM_JOB_ID
    address=$(hostname -i)
    port=$((20000 + SLURM_JOB_ID % 5000 * 2))
    mkdir -m 700 "$temp"
    mkfifo "$temp/alive"
    exec 3<>"$temp/alive"
    common=(--block --disable-usage-stats "--temp-dir=$temp/r" --num-cpus=2 --num-gpus=0 --object-store-memory=107374182
        --dashboard-agent-listen-port=0 --min-worker-port=0 --max-worker-port=0)
    "$BENCH_PYTHON" "$BENCH_SCRIPTS/limit_node.py" "$address:$port" "$SLURM_JOB_NUM_NODES" "$temp/alive" --head \
        "--node-ip-address=$address" "--port=$port" "--ray-client-server-port=$((port + 1))" --include-dashboard=false \
        "${common[@]}" > ray-head.log 2>&1 &
    head=$!
    if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
        others=$((SLURM_JOB_NUM_NODES - 1))
        srun --relative=1 "--nodes=$others" "--ntasks=$others" --cpu-bind=none --output=ray-worker.log \
            "$BENCH_PYTHON" "$BENCH_SCRIPTS/limit_node.py" "$address:$port" "--address=$address:$port" "${common[@]}" &
        worker=$!
    fi
    read -r -t 90 -u 3 || exit 1
    export RAY_ADDRESS=$address:$port
fi
"$BENCH_PYTHON" "$BENCH_SCRIPTS/${BENCH_PAYLOAD:-marks.py}"
echo $? > ended
[ -z "$worker" ] || kill -TERM "$worker"  # srun ends its step; killed itself, it would leave that to the end of the job.
[ -z "$head" ] || kill -KILL "$head"
wait 2> /dev/null
[ -z "$temp" ] || rm -rf "$temp"
