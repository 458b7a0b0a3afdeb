# GPU scripts beside each other on one machine: `. tools/gpu/lanes.sh` from the root of the repository, with STACK and OUT set.
#
#   lane 0,1 0-15; run 300 loop python3 -m tools.gpu.loop --stack $STACK --gpus 2 --layers 48 --steps 2 --out $OUT/loop
#   lane 2   16-31; run 100 staged $V python3 -m tools.gpu.conformance --items staged --out $OUT/staged; run 90 kernels $T ...
#
# each in a subshell of its own in the background: `( lane ...; run ...; run ... ) &`, then `finish`. An item begins only while the
# seconds that it needs are left of END (default 580), at which everything is ended; $OUT/order says what began and ended when.
: "${END:=580}"
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 PYTHONUNBUFFERED=1
V="env PYTHONPATH=$STACK/vllm:workers:schema:."
T="env PYTHONPATH=$STACK/te:$STACK/megatron:workers:schema:client:."
mkdir -p "$OUT"

lane() { # GPUs, cores: of everything in this subshell
    export CUDA_VISIBLE_DEVICES=$1
    taskset -cp "$2" "$BASHPID" >/dev/null
}

run() { # seconds it needs, name, command
    local need=$1 name=$2 left=$((END - SECONDS))
    shift 2
    if [ "$left" -lt "$need" ]; then
        echo "-- $name: $left s left, $need needed" | tee -a "$OUT/order"
        return
    fi
    mkdir -p "$OUT/$name"
    echo "++ $name at $SECONDS s" | tee -a "$OUT/order"
    "$@" >"$OUT/$name/stdout" 2>"$OUT/$name/stderr"
    echo "== $name: status $? at $SECONDS s" | tee -a "$OUT/order"
}

finish() { # waits for every lane, or for END
    local lanes
    lanes=$(jobs -p)
    (
        sleep $((END - SECONDS))
        pkill -TERM -f 'python3 -m (tests|tools)[.]'
        sleep 5
        pkill -KILL -f 'python3 -m (tests|tools)[.]|artd_workers|api_server|VLLM::'
    ) &
    local ending=$!
    # shellcheck disable=SC2086 # one word for each lane
    wait $lanes
    kill "$ending" 2>/dev/null
    nvidia-smi --query-gpu=index,memory.used --format=csv,noheader || true
}
