# Source this on the GPU host: the project, vLLM and its packages, offline; NVLink multicast stays off, which hosts that share a switch ask for.
export PYTHONPATH="$PWD:/tmp/gpu/vllm:/tmp/gpu/site" HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1 VLLM_ALLREDUCE_USE_SYMM_MEM=0
