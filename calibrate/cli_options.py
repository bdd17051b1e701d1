"""Options that several commands share."""

import functools
from collections.abc import Callable
from pathlib import Path

import click


def _together(*options: Callable) -> Callable:
    return lambda command: functools.reduce(lambda wrapped, option: option(wrapped), reversed(options), command)


as_json = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on stdout.")
recipe = click.option("--recipe", help="Recipe file or family; the default is chosen by the model's type.")
device = click.option("--device", help="cpu, cuda, cuda:1 or auto (spread over GPUs). Default: cuda where there is one.")
trust_remote_code = click.option("--trust-remote-code", is_flag=True, help="Run the Python code that the checkpoint brings.")
model_options = _together(
    recipe,
    device,
    click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), help="Compute type. Default: what this host is fast in."),
    trust_remote_code,
    click.option(
        "--streaming",
        type=click.Choice(["auto", "always", "never"]),
        default="auto",
        show_default=True,
        help="Read the model layer by layer, to the same result: where it does not fit into memory, always, or never.",
    ),
    click.option("--kvarn", is_flag=True, help="Collect second moments too, from which KVarN variance tables are made."),
)
new_folder = _together(
    click.option("--output", "-o", type=click.Path(path_type=Path), required=True, help="Folder to write."),
    click.option("--force", is_flag=True, help="Replace the output folder."),
)
row_options = _together(
    click.option("--data", help="File, folder, mix (.yaml), hub id, `builtin` or `random`. Default: the recipe's, else the built-in text."),
    click.option("--samples", type=int, help="Rows to calibrate on."),
    click.option("--sequence-length", type=int, help="Tokens a row at most."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--text-column", help="Column that holds text. Default: found by itself."),
    click.option("--chat-column", help="Column that holds chat messages. Default: found by itself."),
    click.option("--split", default="train", show_default=True, help="Split of a hub data set."),
)
corpus_options = _together(
    row_options,
    click.option("--save-every", type=click.FloatRange(0), default=60.0, show_default=True, help="Seconds between saves of a resumable state."),
    click.option("--tokens-per-batch", type=click.IntRange(1), help="Tokens in one forward. Another value may move K and V by matmul rounding."),
)
skip_layers = click.option("--skip-layers", help="Layers to leave in 16 bits: 0,1,sliding_window, or none. Default: the recipe's.")
policy_options = _together(
    click.option("--policy", type=click.Choice(["amax", "mse", "percentile", "pow2"]), help="How scales are solved (docs/policies.md)."),
    click.option("--granularity", type=click.Choice(["tensor", "head"]), help="One scale a tensor, or one a KV head."),
    click.option("--format", "number_format", type=click.Choice(["e4m3", "e4m3fnuz", "e5m2"]), help="FP8 format of the cache."),
    click.option("--margin", type=click.FloatRange(1, 1024), help="Headroom over amax."),
    click.option("--percentile", type=click.FloatRange(50, 100, min_open=True), help="For --policy percentile."),
    click.option("--search-octaves", type=click.IntRange(1, 8), help="Range of --policy mse, in powers of two above the floor."),
)
