"""Tiny random models of a family, built from its own config class by the `tiny:` part of a recipe, and checkpoints of them."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from calibrate.errors import UsageError
from calibrate.families.shrink import VOCAB
from calibrate.model.load import quiet_transformers

_MOST_PARAMETERS = 20_000_000
_GAIN = 4.0


def tiny_config(model_type: str, fields: Mapping[str, Any]) -> PreTrainedConfig:
    """A config of this type with these fields. Raises UsageError in one line: no such type, or its class refuses the fields."""
    with _as_usage_error(f"tiny {model_type}: its config class refuses the fields"):
        return AutoConfig.for_model(model_type, **copy.deepcopy(dict(fields)))


def tiny_model(config: PreTrainedConfig, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """A random model in eval mode, weights larger than the library's initialization so that K and V are not near zero.

    Raises:
        UsageError: transformers cannot build it, or it is not tiny.
    """
    auto = AutoModelForImageTextToText if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES else AutoModelForCausalLM
    with _as_usage_error(f"tiny {config.model_type}: transformers cannot build it"), torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > _MOST_PARAMETERS:
        raise UsageError(f"tiny {config.model_type} has {size:,} parameters: set the fields that make it large (at most {_MOST_PARAMETERS:,})")
    with _as_usage_error(f"tiny {config.model_type}: transformers cannot build it"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 and not name.endswith("A_log"):  # the logarithm of a decay rate, not a weight
                parameter.mul_(_GAIN)
    return model.to(dtype).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer of 256 tokens: three special ones and the printable bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB - 3]
    vocab = {token: number for number, token in enumerate(["<pad>", "<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=512)


def tiny_checkpoint(path: Path, config: PreTrainedConfig, *, dtype: torch.dtype = torch.bfloat16, shard: str | None = None, seed: int = 0) -> Path:
    """Save a tiny model with its tokenizer; `shard` is the shard size (as "100KB") where several files are wanted."""
    model = tiny_model(config, dtype=dtype, seed=seed)
    with quiet_transformers():
        model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    tiny_tokenizer().save_pretrained(path)
    return path


@contextmanager
def _as_usage_error(what: str) -> Iterator[None]:
    try:
        with quiet_transformers():  # remarks on sizes that are small on purpose
            yield
    except UsageError:
        raise
    except Exception as error:  # config and modeling classes raise their own kinds
        raise UsageError(f"{what}: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error
