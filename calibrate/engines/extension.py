"""Runs inside vLLM's workers: says what scales every attention layer holds, as plain lists that need no insecure serialization."""

from typing import Any


def scales_of(model) -> list[dict[str, Any]]:
    """Records of all attention modules of `model` in module order.

    Each has `module`, `scales` and `floats` (by kind: the values of `_x_scale` as exact float32, and `_x_scale_float`), `num_kv_heads` and
    `num_heads` on this rank, `head_size`, `kv_cache_dtype`, `impl`, `backend`, and `caches`: whether the layer reads a KV cache (encoder
    attention does not; a KV-shared reader does).
    """
    return [_record(name, module) for name, module in model.named_modules() if hasattr(module, "_k_scale_float")]


def _record(name: str, module) -> dict[str, Any]:
    backend = getattr(module, "attn_backend", None)
    return {
        "module": name,
        "scales": {kind: getattr(module, f"_{kind}_scale").detach().float().flatten().tolist() for kind in "kvq"},
        "floats": {kind: float(getattr(module, f"_{kind}_scale_float")) for kind in "kvq"},
        "num_heads": int(module.num_heads),
        "num_kv_heads": int(getattr(module, "num_kv_heads", 1)),  # MLA caches one latent
        "head_size": int(module.head_size),
        "kv_cache_dtype": str(module.kv_cache_dtype),
        "impl": type(module.impl).__name__,
        "backend": type(module.impl).__name__ if backend is None else backend.get_name(),
        "caches": str(getattr(module, "attn_type", "decoder")).lower().rsplit(".", 1)[-1] not in ("encoder", "encoder_only"),
    }


class ScaleReader:
    """vLLM's `worker_extension_cls`: its methods become the worker's, called through `collective_rpc`."""

    def kv_scales(self) -> list[dict[str, Any]]:
        return scales_of(self.get_model())

    def request_amx(self) -> bool:
        """Ask the kernel for AMX tile state in this worker, where its CPU attention uses it.

        vLLM 0.32 picks AMX attention without asking; unless a oneDNN matmul happened to ask before (in small models none does), the
        first token dies of SIGILL. True when AMX is used and granted.
        """
        import torch

        if self.device.type != "cpu" or not torch.cpu._is_amx_tile_supported():
            return False
        return torch.cpu._init_amx()
