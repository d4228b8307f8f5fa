#!/bin/bash
# The procedure of "Deploying on Slurm" in Ray's documentation, in our own words: the head on the first node, a pause of
# 10 s, each worker with a pause of 5 s after it, and the payload where the script runs. The job's end ends Ray.
# No dashboard and a small object store, as with all others here.
PATH=$(dirname "$BENCH_PYTHON"):$PATH
nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address)
export RAY_ADDRESS=$address:6379
common=(--num-cpus=2 --num-gpus=0 --object-store-memory=107374182 --disable-usage-stats --block)
srun --nodes=1 --ntasks=1 --nodelist="$head" --output=ray-head.log \
    ray start --head "--node-ip-address=$address" --port=6379 --include-dashboard=false "${common[@]}" &
sleep 10
for worker in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --nodelist="$worker" --output="ray-$worker.log" ray start "--address=$RAY_ADDRESS" "${common[@]}" &
    sleep 5
done
"$BENCH_PYTHON" "$BENCH_SCRIPTS/marks.py"
echo $? > ended
