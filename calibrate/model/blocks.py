"""Attention over long sequences in blocks of queries: no mask and no scores as large as the square of the length.

Plain causal attention through torch's flash kernels needs none of this and is left alone. What does need it are masks of another shape (sliding
windows, chunks), attention in plain operations (sinks), and heads whose K and V differ in size, for which the CPU has no flash kernel.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

LONG = 4096  # tokens; in shorter rows attention runs as the model has it
_ELEMENTS = 1 << 22  # of a block's mask, or of its scores over all heads


@dataclass(frozen=True)
class _Rule:
    """How a mask is made, in place of the mask.

    Attributes:
        make: transformers' mask function of the model's attention. given: what the model called it with.
    """

    make: Callable[..., torch.Tensor]
    given: dict[str, Any]

    @property
    def reach(self) -> int | None:
        """How far back a query looks; None without limit."""
        return self.given.get("local_size")

    def block(self, queries: range, keys: range) -> torch.Tensor:
        """The mask of some queries over some keys: [batch, 1, queries, keys]."""
        here = {"q_length": len(queries), "q_offset": queries.start, "kv_length": len(keys), "kv_offset": keys.start, "allow_is_causal_skip": False}
        return self.make(**self.given | here)


_rules: dict[int, _Rule] | None = None  # by the address of the one element of the mask that stands for the rule; None outside `masks_as_rules`


@contextmanager
def masks_as_rules(model: PreTrainedModel, length: int) -> Iterator[None]:
    """While it lasts, a forward over `length` tokens from position 0 makes no masks, where that is long: one element, expanded, stands for each.

    Only for models all of whose attention passes through `attend`.
    """
    global _rules
    if length <= LONG:
        yield
        return
    name = model.config.get_text_config(decoder=True)._attn_implementation or "eager"
    make, places = ALL_MASK_ATTENTION_FUNCTIONS[name], []

    def rule(**given: Any) -> torch.Tensor | None:
        reach = given.get("local_size")
        none_needed = make is sdpa_mask and (reach is None or length <= reach)
        if none_needed or given["q_length"] != given["kv_length"] or given.get("attention_mask") is not None or not given["allow_is_causal_skip"]:
            return make(**given)
        # its one value forbids everything, which no mask does: `attend` knows a copy of it by that
        place = torch.zeros(1, dtype=torch.bool) if make is sdpa_mask else torch.full((1,), torch.nan, dtype=given["dtype"])
        place = place.to(given["device"])
        places.append(place)  # its address is a key
        _rules[place.data_ptr()] = _Rule(make, given)
        return place.expand(given["batch_size"], 1, length, length)

    ALL_MASK_ATTENTION_FUNCTIONS[name], _rules = rule, {}
    try:
        yield
    finally:
        del ALL_MASK_ATTENTION_FUNCTIONS[name]  # uncovers the global one
        _rules = None


def attend(
    function: Callable[..., Any],
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """`function(module, query, key, value, attention_mask, …)`, an attention of transformers, block by block within `masks_as_rules`.

    Args:
        query: [batch, heads, seq, head_dim].

    Returns:
        as `function`: (output [batch, seq, heads, value_head_dim], weights or None).
    """
    flash = function is sdpa_attention_forward and key.shape[-1] == value.shape[-1]
    rule = None if _rules is None or attention_mask is None else _rules.get(attention_mask.data_ptr())
    if _rules is not None and attention_mask is None and not flash and query.device.type == "cpu":
        rule = _Rule(sdpa_mask, {"batch_size": len(query), "device": query.device})
    if rule is None and _rules and attention_mask is not None and _forbids_everything(attention_mask):
        raise RuntimeError(f"{type(module).__name__} changes its attention mask, which stands for a rule in rows over {LONG} tokens")
    if rule is None:
        return function(module, query, key, value, attention_mask, *args, **kwargs)
    length, reach = query.shape[2], rule.reach
    span = length if reach is None else min(length, 2 * reach)
    rows = max(1, min(max(512, reach or 0), _ELEMENTS // (span * (1 if flash else query.shape[0] * query.shape[1]))))
    # made first: small results that stay between large ones that go would leave holes in the heap
    output = query.new_empty(query.shape[0], length, query.shape[1], value.shape[-1])
    for first in range(0, length, rows):
        last, low = min(first + rows, length), 0 if reach is None else max(0, first - reach)
        mask = rule.block(range(first, last), range(low, last))
        part, _ = function(module, query[:, :, first:last], key[:, :, low:last], value[:, :, low:last], mask, *args, **kwargs)
        output[:, first:last] = part
        del part
    return output, None


def _forbids_everything(mask: torch.Tensor) -> bool:
    """Whether a mask is a copy of a rule's: the first token may look at itself in any other."""
    first = mask.flatten()[0]
    return not bool(first) if mask.dtype == torch.bool else bool(first.isnan())
