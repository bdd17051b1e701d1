"""What one token costs in each KV-cache format, metadata included, as the engines lay it out."""

from collections.abc import Callable
from dataclasses import dataclass

from calibrate.lowbit import make_format
from calibrate.lowbit.base import sixteen_bit_layers


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


def _bytes_each(size: float) -> Callable[[int, int], float]:
    return lambda key, value: (key + value) * size


def _low_bit(name: str, note: str, *, latent: bool = False) -> KVFormat:
    """A format that `calibrate.lowbit` runs, where its size and what stays in 16 bits are written down. `latent`: engines offer it for MLA."""
    fmt = make_format(name)

    def head_bytes(key: int, value: int) -> float:
        return fmt.token_bytes(1, key, value)

    waiting = fmt.key_window.sink + fmt.key_window.group if fmt.key_window.group > 1 else 0
    return KVFormat(name, head_bytes, head_bytes if latent else None, note, fmt.skip_ends, fmt.skip_sliding, sixteen_bit_tokens=waiting)


def _nvfp4(key: int, value: int) -> float:
    return sum(dim // 2 + dim // 16 for dim in (key, value))  # packed fp4, and one fp8 scale each 16 channels


_TURBOQUANT = "vLLM, CUDA (FlashAttention-2); dense models keep two layers at either end 16-bit"
_KVARN = "not in vLLM 0.33 (fork and open pull requests); first 128 tokens and the open tile 16-bit, sliding layers 16-bit"
SIXTEEN_BIT = "16-bit"
FORMATS: dict[str, KVFormat] = {
    fmt.name: fmt
    for fmt in (
        KVFormat(SIXTEEN_BIT, _bytes_each(2), _bytes_each(2), "bfloat16 or float16: what the model was trained with"),
        KVFormat("fp8", _bytes_each(1), _bytes_each(1), "calibrated scales; vLLM on SM89+ GPUs, MI300, CPUs with AVX-512"),
        KVFormat("fp8_ds_mla", _bytes_each(1), lambda key, value: 656, "MLA on FlashMLA sparse: latent FP8, rotary key 16-bit, 16 bytes of scales"),
        *(_low_bit(f"{kind}_per_token_head", "vLLM TRITON_ATTN; scales at run time", latent=True) for kind in ("fp8", "int8", "int4")),
        KVFormat("nvfp4", _nvfp4, None, "vLLM FLASHINFER on SM100"),
        *(_low_bit(f"turboquant_{preset}", _TURBOQUANT) for preset in ("k8v4", "4bit_nc", "k3v4_nc", "3bit_nc")),
        *(_low_bit(f"kvarn_{preset}_g128", _KVARN) for preset in ("k4v4", "k4v2", "k2v2")),
    )
}
ONLY_LATENT = {"fp8_ds_mla"}
_FP8 = {"fp8_e4m3": "fp8", "fp8_e5m2": "fp8_e5m2"}


def served_name(name: str) -> str | None:
    """What vLLM's `--kv-cache-dtype` calls a format of `calibrate.lowbit`; None where no released vLLM has it."""
    known = FORMATS.get(name)
    return _FP8.get(name) or (name if known is not None and known.note != _KVARN else None)


def stored_in(fmt: KVFormat, layers: tuple[CachedLayer, ...], depth: int | None) -> dict[int, float] | None:
    """Layer index → bytes a token, 16-bit where the format leaves a layer so. None where the model's layers cannot be stored in it.

    `depth`: number of the model's layers, of which the ends may be skipped; None for hybrids, in which engines skip none.
    """
    if fmt.name in ONLY_LATENT and not all(layer.latent for layer in layers):
        return None
    skipped = sixteen_bit_layers(fmt.skip_ends, fmt.skip_sliding, {layer.index: bool(layer.window) for layer in layers}, depth)
    found: dict[int, float] = {}
    for layer in layers:
        size = fmt.token_bytes(layer)
        if size is None:
            return None
        found[layer.index] = layer.sixteen_bit if layer.index in skipped else size
    return found
