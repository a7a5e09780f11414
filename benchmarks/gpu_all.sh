#!/usr/bin/env bash
# Everything that needs a GPU, in some five minutes: tests and compute-sanitizer side by side, then what is timed.
# usage: benchmarks/gpu_all.sh FOLDER    which gets the outputs
set -u
cd "$(dirname "$0")/.."
out=${1:?a folder for the outputs}
export PYTHONPATH=src:tests:.:${PYTHONPATH:-} PYTHONUNBUFFERED=1
check() { # name, command ...
    name=$1
    shift
    timeout 280 "$@" >"$out/$name.txt" 2>&1
    echo "$name: exit $?"
}
for name in kernels_cuda collectives no_waiting fsdp_cuda bench_codec_cuda train_data_cuda; do
    check "$name" python3 tests/gpu/gpu_script.py "test_$name" &
done
for tool in memcheck racecheck; do
    check "$tool" benchmarks/gpu_sanitize.sh "$tool" &
done
wait
check step python3 -m benchmarks.gpu_step --out "$out/step-h200.jsonl"
check codec python3 -c "
from pathlib import Path
from benchmarks.codec import on_gpu, run
raise SystemExit(run(on_gpu(out=Path('$out/codec-h200.jsonl'))))"
cat "$out/step.txt" "$out/codec.txt"
