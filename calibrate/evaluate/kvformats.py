"""What one token costs in each KV-cache format, metadata included, as the engines lay it out."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

_FP32, _FP16 = 4, 2
_KVARN_SINK = 128  # tokens at the start that KVarN leaves in 16 bits
_KVARN_TILE = 128  # tokens that wait in 16 bits until a tile is full


@dataclass(frozen=True)
class CachedLayer:
    """A layer that writes a KV cache, on one rank.

    Attributes:
        index: in the model. kv_heads: cached heads on this rank. key_dim, value_dim: channels of each.
        window: tokens that are kept, None for all.
        latent: multi-head latent attention: one line a token, latent (`key_dim`) and rotary key (`value_dim`), the same on every rank.
    """

    index: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    latent: bool = False

    @property
    def sixteen_bit(self) -> float:
        """Bytes a token in 16 bits."""
        return self.kv_heads * (self.key_dim + self.value_dim) * 2


@dataclass(frozen=True)
class KVFormat:
    """A cache format.

    Attributes:
        name: what vLLM's `--kv-cache-dtype` calls it, where it has it.
        head_bytes: (key_dim, value_dim) → bytes of one token of one head.
        latent_bytes: the same of a latent line, None where engines do not offer the format for MLA.
        skip_ends: layers at either end that stay in 16 bits (dense models only). skip_sliding: sliding-window layers stay in 16 bits.
        sixteen_bit_tokens: tokens a sequence of each layer that stay in 16 bits.
        note: where it runs, and what else it costs.
    """

    name: str
    head_bytes: Callable[[int, int], float]
    latent_bytes: Callable[[int, int], float] | None
    note: str
    skip_ends: int = 0
    skip_sliding: bool = False
    sixteen_bit_tokens: int = 0

    def token_bytes(self, layer: CachedLayer) -> float | None:
        """Bytes a token in a layer that is stored in this format; None where engines do not offer it for the layer."""
        if layer.latent:
            return None if self.latent_bytes is None else self.latent_bytes(layer.key_dim, layer.value_dim)
        return layer.kv_heads * self.head_bytes(layer.key_dim, layer.value_dim)


def _bytes_each(size: float, scale_bytes: int = 0) -> Callable[[int, int], float]:
    """`size` bytes a channel and `scale_bytes` more for each of K and V."""
    return lambda key, value: (key + value) * size + 2 * scale_bytes


def _int4(key: int, value: int) -> float:
    return key // 2 + value // 2 + 2 * _FP32


def _nvfp4(key: int, value: int) -> float:
    return sum(dim // 2 + dim // 16 for dim in (key, value))  # packed fp4, and one fp8 scale each 16 channels


def _turboquant(key_bits: int, value_bits: int) -> Callable[[int, int], float]:
    def head_bytes(key: int, value: int) -> float:
        key_side = key if key_bits == 8 else ceil(key * key_bits / 8) + _FP16  # norm
        slot = key_side + ceil(value * value_bits / 8) + 2 * _FP16  # scale and zero
        return slot + slot % 2

    return head_bytes


def _kvarn(key_bits: int, value_bits: int, group: int = _KVARN_TILE) -> Callable[[int, int], float]:
    def head_bytes(key: int, value: int) -> float:
        """Of a full tile of `group` tokens, K keeps scale and zero a channel and a scale a token; V a scale a channel, scale and zero a token."""
        key_side = key * key_bits / 8 + (2 * key / group + 1) * _FP16
        return key_side + value * value_bits / 8 + (value / group + 2) * _FP16

    return head_bytes


def _turboquant_format(name: str, key_bits: int, value_bits: int) -> KVFormat:
    note = "vLLM, CUDA (FlashAttention-2); dense models keep two layers at either end 16-bit"
    return KVFormat(name, _turboquant(key_bits, value_bits), None, note, skip_ends=2)


def _kvarn_format(key_bits: int, value_bits: int) -> KVFormat:
    note = "not in vLLM 0.33 (fork and open pull requests); first 128 tokens and the open tile 16-bit, sliding layers 16-bit"
    name = f"kvarn_k{key_bits}v{value_bits}_g128"
    return KVFormat(name, _kvarn(key_bits, value_bits), None, note, skip_sliding=True, sixteen_bit_tokens=_KVARN_SINK + _KVARN_TILE)


SIXTEEN_BIT = "16-bit"
FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat(SIXTEEN_BIT, _bytes_each(2), _bytes_each(2), "bfloat16 or float16: what the model was trained with"),
        KVFormat("fp8", _bytes_each(1), _bytes_each(1), "calibrated scales; vLLM on SM89+ GPUs, MI300, CPUs with AVX-512"),
        KVFormat("fp8_ds_mla", _bytes_each(1), lambda key, value: 656, "MLA on FlashMLA sparse: latent FP8, rotary key 16-bit, 16 bytes of scales"),
        KVFormat("fp8_per_token_head", _bytes_each(1, _FP32), lambda k, v: k + v + 2 * _FP32, "vLLM TRITON_ATTN; scales at run time"),
        KVFormat("int8_per_token_head", _bytes_each(1, _FP32), lambda k, v: k + v + 2 * _FP32, "vLLM TRITON_ATTN; scales at run time"),
        KVFormat("int4_per_token_head", _int4, lambda k, v: (k + v) // 2 + 2 * _FP32, "vLLM TRITON_ATTN; scales at run time"),
        KVFormat("nvfp4", _nvfp4, None, "vLLM FLASHINFER on SM100"),
        _turboquant_format("turboquant_k8v4", 8, 4),
        _turboquant_format("turboquant_4bit_nc", 4, 4),
        _turboquant_format("turboquant_k3v4_nc", 3, 4),
        _turboquant_format("turboquant_3bit_nc", 3, 3),
        _kvarn_format(4, 4),
        _kvarn_format(4, 2),
        _kvarn_format(2, 2),
    )
}
ONLY_LATENT = {"fp8_ds_mla"}


def stored_in(fmt: KVFormat, layers: tuple[CachedLayer, ...], depth: int | None) -> dict[int, float] | None:
    """Layer index → bytes a token, 16-bit where the format leaves a layer so. None where the model's layers cannot be stored in it.

    `depth`: number of the model's layers, of which the ends may be skipped; None for hybrids, in which engines skip none.
    """
    if fmt.name in ONLY_LATENT and not all(layer.latent for layer in layers):
        return None
    ends = 0 if depth is None else min(fmt.skip_ends, depth // 2)
    skipped = set() if depth is None else {*range(ends), *range(depth - ends, depth)}
    found: dict[int, float] = {}
    for layer in layers:
        size = fmt.token_bytes(layer)
        if size is None:
            return None
        found[layer.index] = layer.sixteen_bit if layer.index in skipped or (fmt.skip_sliding and layer.window) else size
    return found
