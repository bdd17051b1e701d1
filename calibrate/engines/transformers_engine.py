"""The engine that runs everywhere: transformers, with an FP8 cache emulated exactly (`quantized_cache`), or a low-bit one (`calibrate.lowbit`)."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from calibrate.engines.lockstep import Lockstep
from calibrate.engines.quantized_cache import CacheQuantizer, QuantizedCache
from calibrate.engines.serving import cache_name, serving
from calibrate.engines.session import EngineInfo, TokenScores, Variant
from calibrate.errors import UsageError
from calibrate.lowbit import LowBitCache, Placement
from calibrate.model import CacheLayout, SourceCheckpoint, cache_dtype_of, choose_device, compute_dtype, load_model, probe_layout
from calibrate.model.attention import wrapped_attention
from calibrate.model.source import context_length_of
from calibrate.statistics import CACHE_DTYPES

TOP_K = 64
_LOGITS_AT_ONCE = {"cpu": 1 << 25, "cuda": 1 << 28}  # elements of one row
# of rows that are scored together: how many, elements of logits, elements of their caches
_ROWS_TOGETHER, _LOGITS_TOGETHER, _CACHE_TOGETHER = 8, 1 << 27, 1 << 29


class TransformersEngine:
    """Opens sessions that share one loaded model.

    Args:
        source: the checkpoint; a KV scheme in it is ignored, the variant says what the cache does.
        device, dtype: where and in what type to compute; None chooses what this host is fast in.
        block: tokens of a prefill step. Later steps attend to the quantized cache of earlier ones.
        quantize_queries: quantize Q with its own scale, as FLASH_ATTN and TRITON_ATTN on CUDA do. Latent attention, and classes that hand Q to no
            attention interface (GPT-J, Falcon), keep a 16-bit Q in any case.
    """

    def __init__(
        self,
        source: SourceCheckpoint,
        *,
        device: str | None = None,
        dtype: str | None = None,
        block: int = 512,
        quantize_queries: bool = True,
        trust_remote_code: bool = False,
    ) -> None:
        if block < 1:
            raise UsageError(f"a prefill block of {block} tokens is none: give at least 1")
        chosen = choose_device(device)
        self.source, self.block, self.quantize_queries = source, block, quantize_queries
        self.model = load_model(source, device=chosen, dtype=compute_dtype(source, chosen, dtype), trust_remote_code=trust_remote_code)
        self.layout = probe_layout(self.model)

    def release(self) -> None:
        """Let go of the model: another engine may need the device's memory. No session can be opened after it."""
        del self.model
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    @contextmanager
    def session(self, variant: Variant) -> Iterator["TransformersSession"]:
        """The model with this variant's cache. One session at a time.

        Raises:
            UsageError: scales, tables or codebooks of another model, or a model that the variant's format cannot store.
        """
        cache_dtype = CACHE_DTYPES[cache_dtype_of(self.source)].dtype
        sixteen_bit = serving(self.source.path).kv_cache_dtype_skip_layers
        quantizer = CacheQuantizer(self.layout, variant, cache_dtype, self.model, sixteen_bit=sixteen_bit)
        config = self.model.config.get_text_config(decoder=True)
        placement = None if variant.store is None else Placement(self.layout, variant.store, cache_dtype, config)
        queries = self.quantize_queries and bool(quantizer.indices)
        lockstep = Lockstep(self.model, self.layout)
        around = _quantized_queries(quantizer, lockstep) if queries else lockstep.around
        with wrapped_attention(self.model, around) if queries or lockstep.possible else nullcontext():
            yield TransformersSession(self.model, self.layout, quantizer, self.block, queries, lockstep, placement)


def _quantized_queries(quantizer: CacheQuantizer, lockstep: Lockstep) -> Callable[..., Any]:
    def around(module: nn.Module, compute: Callable[..., Any], query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        index = quantizer.indices.get(module)
        return lockstep.around(module, compute, query if index is None else quantizer(index, "q", query), key, value)

    return around


class TransformersSession:
    """A model with one variant of the cache. Rows of one length go through it together, prompts one at a time, and the answers to them together."""

    def __init__(
        self,
        model: PreTrainedModel,
        layout: CacheLayout,
        quantizer: CacheQuantizer,
        block: int,
        queries: bool,
        lockstep: Lockstep,
        placement: Placement | None = None,
    ) -> None:
        self._model, self._layout, self._quantizer, self._block, self._queries = model, layout, quantizer, block, queries
        self._lockstep, self._placement = lockstep, placement
        self._config = model.config.get_text_config(decoder=True)
        self._kept: tuple[list[int], QuantizedCache | LowBitCache] | None = None  # the last prompt and its cache

    def info(self) -> EngineInfo:
        """What computes here."""
        device = self._model.device
        return EngineInfo(
            engine="transformers",
            version=f"transformers {version('transformers')}, torch {version('torch')}",
            attention_backend=f"{self._config._attn_implementation}{', fp8 queries' if self._queries else ''}",
            kv_cache_dtype=self._cache_name(),
            compute_dtype=str(self._model.dtype).removeprefix("torch."),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        )

    def _cache_name(self) -> str:
        if self._placement is not None:
            return self._placement.fmt.name
        fmt = self._quantizer.format
        plain = str(self._quantizer.cache_dtype).removeprefix("torch.")
        return plain if fmt is None else cache_name(f"fp8_{fmt.name}", self._quantizer.sixteen_bit)

    def _new_cache(self) -> QuantizedCache | LowBitCache:
        return QuantizedCache(self._config, self._quantizer) if self._placement is None else LowBitCache(self._config, self._placement)

    @torch.inference_mode()
    def score(self, rows: Sequence[Sequence[int]]) -> list[TokenScores]:
        """Teacher-forced scores of whole rows, the TOP_K likeliest tokens at each place. Which rows are given together moves rounding only."""
        checked = [self._checked(row, "row", 2) for row in rows]
        most = _LOGITS_AT_ONCE.get(self._model.device.type, _LOGITS_AT_ONCE["cuda"]) // self._config.vocab_size
        step = max(1, min(self._block, most))
        found: dict[int, TokenScores] = {}
        for numbers in _alike(checked, _LOGITS_TOGETHER // (step * self._config.vocab_size), _CACHE_TOGETHER // self._token_elements()):
            found |= zip(numbers, self._score([checked[number] for number in numbers], step), strict=True)
        return [found[number] for number in range(len(rows))]

    def _token_elements(self) -> int:
        """Numbers that a token leaves in the cache; at least one."""
        sizes = (layer.num_key_value_heads * (layer.head_dim + layer.value_head_dim) for layer in self._layout.layers if layer.writes)
        return max(1, sum(sizes))

    def _score(self, rows: list[list[int]], step: int) -> list[TokenScores]:
        """Of rows of one length."""
        cache = self._new_cache()
        tokens = torch.tensor(rows, device=self._model.device)  # [rows, length]
        parts = []
        for start in range(0, tokens.shape[1] - 1, step):
            wanted = tokens[:, start + 1 : start + 1 + step]
            logits = self._forward(tokens[:, start : start + wanted.shape[1]], cache).logits  # [rows, tokens, vocab]
            parts.append([_top(each.to(torch.float32), truth.to(each.device)) for each, truth in zip(logits, wanted, strict=True)])
        return [TokenScores(*(np.concatenate(kind) for kind in zip(*row, strict=True))) for row in zip(*parts, strict=True)]

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, stop_ids: Sequence[int]) -> list[list[int]]:
        """Greedy continuations, without the prompt and without the stop token."""
        checked = [self._checked(prompt, "prompt", 1, max_new_tokens) for prompt in prompts]
        if max_new_tokens < 1:
            return [[] for _ in checked]
        chunks = [checked] if self._lockstep.possible else [[prompt] for prompt in checked]
        return [answer for chunk in chunks for answer in self._generate(chunk, max_new_tokens, set(stop_ids))]

    def _generate(self, prompts: list[list[int]], max_new_tokens: int, stop: set[int]) -> list[list[int]]:
        started = [self._started(prompt) for prompt in prompts]
        answers: list[list[int]] = [[] for _ in prompts]
        going = list(range(len(prompts)))
        tokens = [token for token, _ in started]
        while True:
            going, tokens = _without(stop, going, tokens)
            for number, token in zip(going, tokens, strict=True):
                answers[number].append(token)
            if not going or len(answers[going[0]]) == max_new_tokens:
                return answers
            tokens = self._next(tokens, [started[number][1] for number in going]).argmax(dim=-1).tolist()

    def _started(self, prompt: list[int]) -> tuple[int, QuantizedCache | LowBitCache]:
        """The first token of the answer, and the cache that holds the prompt."""
        cache, done = self._prefix(prompt)
        for start in range(done, len(prompt), self._block):
            logits = self._forward(self._one(prompt[start : start + self._block]), cache, logits_to_keep=1).logits
        self._kept = (prompt, cache)
        return int(logits[0, -1].argmax()), cache

    def _next(self, tokens: list[int], caches: list[QuantizedCache | LowBitCache]) -> torch.Tensor:
        """Logits [sequences, vocab] after one more token of each."""
        return self._lockstep.step(tokens, caches) if self._lockstep.possible else self._forward(self._one(tokens), caches[0]).logits[0]

    def _prefix(self, prompt: list[int]) -> tuple[QuantizedCache | LowBitCache, int]:
        """A cache that holds the whole blocks which this prompt shares with the last one, and how many tokens that is.

        Whole blocks were computed by the very same forwards, so reuse changes no bit where the cache can go back to what it held then.
        """
        kept, self._kept = self._kept, None
        if kept is not None:
            before, cache = kept
            shared = next((place for place, (a, b) in enumerate(zip(before, prompt, strict=False)) if a != b), min(len(before), len(prompt)))
            done = min(shared, len(prompt) - 1) // self._block * self._block
            if done and cache.can_return_to(done):
                cache = cache.fork()  # the last answer may still be growing
                cache.crop(done - cache.get_seq_length())
                return cache, done
        return self._new_cache(), 0

    def _one(self, tokens: list[int]) -> torch.Tensor:
        return torch.tensor([tokens], device=self._model.device)

    def _forward(self, tokens: torch.Tensor, cache: QuantizedCache | LowBitCache, **options: Any) -> Any:
        """Of int64 [sequences, tokens]."""
        return self._model(input_ids=tokens, past_key_values=cache, use_cache=True, **options)

    def _checked(self, tokens: Sequence[int], what: str, least: int, room: int = 0) -> list[int]:
        context = context_length_of(self._config.to_dict())
        if len(tokens) < least:
            raise UsageError(f"a {what} of {len(tokens)} tokens cannot be used: at least {least}")
        if context and len(tokens) + room > context:
            more = f" and {room} new ones" if room else ""
            raise UsageError(f"a {what} of {len(tokens):,} tokens{more} is more than the model's context of {context:,}")
        plain = [int(token) for token in tokens]
        if min(plain) < 0 or max(plain) >= self._config.vocab_size:
            raise UsageError(f"a {what} holds a token id outside the model's vocabulary of {self._config.vocab_size:,}")
        return plain


def _alike(rows: list[list[int]], most_rows: int, most_tokens: int) -> Iterator[list[int]]:
    """Numbers of rows that are scored together: of one length and no more than that; a row that is too long by itself goes alone."""
    by_length: dict[int, list[int]] = {}
    for number, row in enumerate(rows):
        by_length.setdefault(len(row), []).append(number)
    for length, numbers in by_length.items():
        together = max(1, min(most_rows, _ROWS_TOGETHER, most_tokens // length))
        for start in range(0, len(numbers), together):
            yield numbers[start : start + together]


def _without(stop: set[int], numbers: list[int], tokens: list[int]) -> tuple[list[int], list[int]]:
    """Both without the places whose token stops."""
    left = [(number, token) for number, token in zip(numbers, tokens, strict=True) if token not in stop]
    return [number for number, _ in left], [token for _, token in left]


def _top(logits: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Log probability of the targets, and ids and log probabilities of the likeliest tokens, from float32 [tokens, vocab]."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    best, ids = logits.topk(min(TOP_K, logits.shape[-1]), dim=-1)
    logprob = logits.gather(1, targets[:, None]) - total
    return logprob[:, 0].cpu().numpy(), ids.to(torch.int32).cpu().numpy(), (best - total).cpu().numpy()
