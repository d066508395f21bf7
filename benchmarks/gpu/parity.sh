#!/usr/bin/env bash
# Law 1 on a machine with many cores and a GPU: every combination on the CPU, in eight parts at once, and one build on
# the GPU beside them. Writes one log per part into the folder given.
#
#   benchmarks/gpu/parity.sh MODEL.gguf LOGS
set -euo pipefail
model=$1 logs=$2
cd "$(dirname "$0")/../.."
mkdir -p "$logs"
export GOMP_SPINCOUNT=2000 # sixteen engines share the cores
python3 -c 'import torch, transformers, triton, sys; print("python", sys.version.split()[0], "torch", torch.__version__,
    "transformers", transformers.__version__, "triton", triton.__version__, torch.cuda.get_device_name(0))' >"$logs/versions"
python3 benchmarks/parity.py --part 1/8 --threads 2 --set "model.source=path:$model" --set device.kind=cuda \
    --set attention=reference >"$logs/cuda" 2>&1 &
for part in 1 2 3 4 5 6 7 8; do
    python3 benchmarks/parity.py --part "$part/8" --threads 2 --set "model.source=path:$model" --set device.kind=cpu \
        >"$logs/cpu-$part" 2>&1 &
done
wait
echo done >"$logs/done"
