"""What engines call the scales of a layer."""

import re
from collections.abc import Iterable

from calibrate.errors import UsageError


def tensor_prefixes(modules: Iterable[str], tensors: Iterable[str]) -> dict[str, str]:
    """Attention module path in transformers → prefix of its scales in this checkpoint, as vLLM looks them up.

    The name is the attention module's in the checkpoint's own spelling, which may differ from the module path (hub checkpoints of GPT-2
    leave out "transformer.", multimodal ones move "language_model."). vLLM puts its own attention layer, called `attn`, below that module
    and inserts the name by itself, except where the module is called `attn` already: there it must be spelt out.

    Raises:
        UsageError: a module has no counterpart in the checkpoint, or several.
    """
    owners = {name.rsplit(".", depth)[0] for name in tensors for depth in range(1, 4) if name.count(".") >= depth}
    result = {}
    for module in modules:
        prefix = _spelling(module, owners)
        result[module] = f"{prefix}.attn" if prefix.rsplit(".", 1)[-1] == "attn" else prefix
    return result


def _spelling(module: str, owners: set[str]) -> str:
    parts = module.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts) - 1)
    for start in range(number):  # shorter and shorter tails, down to "layers.3.self_attn"
        tail = ".".join(parts[start:])
        found = {owner for owner in owners if owner == tail or (start and owner.endswith("." + tail))}
        text = {owner for owner in found if not re.search(r"vision|visual|audio|encoder|mtp", owner)} or found
        if len(text) == 1:
            return text.pop()
        if text:
            raise UsageError(f"attention module {module} could be any of {', '.join(sorted(text))} in the checkpoint")
    raise UsageError(f"the checkpoint has no tensors of attention module {module}: it is not the model whose scales these are")
