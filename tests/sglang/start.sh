#!/usr/bin/env bash
# Runs an unmodified SGLang 0.5.23 server on CPU, in the foreground, at 127.0.0.1:PORT.
# Usage: start.sh PORT [any flag of sglang.launch_server ...]
#
# Ready when GET /ready answers 200: half a minute, 3 GB of memory. Only the compiled kernel package is replaced (kernels/);
# HTTP, scheduler, radix cache and sessions are SGLang's own. The weights are random, so is what it writes.
#   MAX_TOTAL_TOKENS=2000   a smaller KV pool
#   NICE=0                  its own share of the CPU; by default it steps back behind everything else
# Useful flags: --enable-session-radix-cache  --enable-streaming-session  --enable-priority-scheduling
#   --enable-cache-report  --enable-metrics  --max-running-requests 1  --reasoning-parser qwen3  --tool-call-parser qwen25
#   --chat-template tests/sglang/model/drops-reasoning.jinja
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
home=${TURNSTILE_SGLANG_HOME:-${XDG_CACHE_HOME:-$HOME/.cache}/turnstile-sglang}
port=${1:?usage: start.sh PORT [flags]}
shift
export PATH="$home/venv/bin:$PATH" PYTHONPATH="$here/kernels" PYTHONDONTWRITEBYTECODE=1
export SGLANG_USE_CPU_ENGINE=1 SGLANG_DISABLE_TORCHVISION=1 OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# --sleep-on-idle: the scheduler would otherwise keep a core busy while it has nothing to do.
exec nice -n "${NICE:-19}" python -m sglang.launch_server --model-path "$home/tiny" --load-format dummy --device cpu \
  --served-model-name tiny --host 127.0.0.1 --port "$port" --attention-backend torch_native --sampling-backend pytorch \
  --disable-cuda-graph --dtype bfloat16 --context-length 4096 --max-total-tokens "${MAX_TOTAL_TOKENS:-20000}" \
  --mem-fraction-static 0.3 --sleep-on-idle "$@"
