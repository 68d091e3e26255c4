"""`compaction kv`: what a conversation's KV cache weighs, by architecture, and what it costs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from compaction.cli.kv_report import Weighed
    from compaction.kv.cost import Gpu

__all__ = ["kv"]


@click.command(short_help="KV bytes per token and in all, by architecture.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL_OR_CONFIG...")
@click.option("--tokens", type=click.IntRange(min=1), default=8192, show_default=True, help="Length of a conversation.")
@click.option("--dtype", default="bf16", show_default=True, help="fp32, bf16, fp16, fp8, int8, int4, int2 or k8v4.")
@click.option("--plot", metavar="FILE.png", help="Draw bytes over the length of the context.")
@click.option("--price", type=float, metavar="USD", help="Price of a GPU-hour; needs --gpu-memory.")
@click.option("--gpu-memory", metavar="BYTES", help="Memory that goes with the price, such as 80GiB.")
@click.option("--weights", metavar="BYTES", help="What the model's weights take of it, such as 16GB.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of tables.")
def kv(
    models: tuple[str, ...],
    tokens: int,
    dtype: str,
    plot: str | None,
    price: float | None,
    gpu_memory: str | None,
    weights: str | None,
    as_json: bool,
) -> None:
    """Bytes of KV cache of models, from their configs alone: no weights are read.

    MODEL_OR_CONFIG is a config.json, a model folder, a built-in name (smollm2, llama-3-8b, gemma-3-1b, deepseek-v3, …)
    or a hub id. Figures are what transformers keeps for one conversation: MHA, GQA, MQA, MLA, sliding and chunked
    windows, shared layers, and the fixed states of linear, state-space and convolutional layers. Below two bytes an
    element, the scales of a quantised cache come on top.

    A conversation that stays on the GPU costs price × bytes / (gpu memory - weights) an hour.

    \b
    Examples:
      compaction kv smollm2 --tokens 8000
      compaction kv llama-3-8b deepseek-v3 gemma-3-1b --tokens 131072 --plot kv.png
      compaction kv ./my-model/config.json --dtype k8v4 --price 2.5 --gpu-memory 80GiB --weights 16GB

    \b
    JSON keys: family, bytes_per_token, tokens, bytes, layers: [{kind, bytes_per_token, keeps, state_bytes, bytes}],
               model, source, dtype, marginal_bytes_per_token (once all windows are full), state_bytes,
               unknown_states (layers whose state is not in `bytes`), kinds: [{kind, layers, keeps, bytes_per_token,
               state_bytes, bytes}]; expanded: {bytes_per_token, bytes} for MLA as transformers <= 5.14 keeps it;
               cost: {usd_per_hour, conversations, price_per_gpu_hour, gpu_memory, weights} with --price;
               for several models {models: [such an object each]}
    """
    from compaction.cli.kv_plot import check_plot, draw
    from compaction.cli.kv_report import show, weigh
    from compaction.cli.kv_sources import resolve
    from compaction.cli.output import emit, say
    from compaction.kv.storage import storage

    check_plot(plot)
    gpu = _gpu(price, gpu_memory, weights)
    stored = storage(dtype)
    weighed: list[Weighed] = [weigh(resolve(name), stored, tokens) for name in models]
    if plot:
        draw(plot, weighed, tokens=tokens, free=gpu.free if gpu else None)
    if as_json:
        rows: list[dict[str, Any]] = [item.to_json(gpu) for item in weighed]
        emit(rows[0] if len(rows) == 1 else {"models": rows})
        return
    show(weighed, tokens, gpu)
    if plot:
        say(f"picture: {plot}")


def _gpu(price: float | None, memory: str | None, weights: str | None) -> Gpu | None:
    from compaction.budget import parse_bytes
    from compaction.kv.cost import Gpu

    if price is None and memory is None and weights is None:
        return None
    if price is None or memory is None:
        raise click.UsageError("a cost needs --price and --gpu-memory, such as --price 2.5 --gpu-memory 80GiB")
    return Gpu(price, parse_bytes(memory), parse_bytes(weights) if weights else 0)
