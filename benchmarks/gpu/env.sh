# Source this on the GPU host: the project, vLLM and its packages, offline.
export PYTHONPATH="$PWD:/tmp/gpu/vllm:/tmp/gpu/site" HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
