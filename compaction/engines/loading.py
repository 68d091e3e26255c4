"""From a name to a model, its tokenizer, device, number format and window.

Invariant: what cannot be loaded raises ModelNotFound or EngineError with one line that names it and the next step.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from compaction.budget import Window
from compaction.engines.quiet import quiet
from compaction.engines.smollm2 import smollm2_folder
from compaction.errors import EngineError, InvalidInput, ModelNotFound

__all__ = ["Loaded", "config_of", "load", "pick_device", "pick_dtype", "window_of"]

DEFAULT_WINDOW = 4096
_DTYPES = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to run, its tokenizer, and the name it goes by."""

    model: Any
    tokenizer: Any
    name: str


def load(model: Any, tokenizer: Any, *, device: str | None, dtype: Any) -> Loaded:
    """Load by name, or take a built pair as it is.

    Raises ModelNotFound for an unknown name, EngineError for a model that cannot be loaded.
    """
    if not isinstance(model, (str, Path)):
        return _take(model, tokenizer, device=device, dtype=dtype)
    name = str(model)
    where = smollm2_folder() if name == "smollm2" else _locate(name)
    target = pick_device(device)
    try:
        built, own = _from_pretrained(where, dtype, target)
    except OSError as exc:
        raise ModelNotFound(
            f"model {name!r} is not 'smollm2', no folder with a model in it, and not on a hub ({_line(exc)})"
        ) from exc
    except (ValueError, RuntimeError, KeyError, ImportError) as exc:
        raise EngineError(f"cannot load model {name!r}: {_line(exc)}") from exc
    return Loaded(built, tokenizer if tokenizer is not None else own, Path(name).name if Path(name).is_dir() else name)


def _take(model: Any, tokenizer: Any, *, device: str | None, dtype: Any) -> Loaded:
    if tokenizer is None:
        raise InvalidInput("a model that is already built needs its tokenizer: TransformersEngine(model, tokenizer=…)")
    if device is not None:
        model = model.to(pick_device(device))
    if dtype is not None:
        model = model.to(pick_dtype(dtype, str(model.device), model.dtype))
    return Loaded(model.eval(), tokenizer, str(getattr(model.config, "name_or_path", "")) or type(model).__name__)


def _locate(name: str) -> str | Path:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"folder {name!r} holds no model: there is no config.json in it")
        return folder
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ModelNotFound(f"model folder {name!r} does not exist: give 'smollm2', a folder or a hub id")
    return name


def _from_pretrained(where: str | Path, dtype: Any, device: str) -> tuple[Any, Any]:
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    with quiet():
        config = AutoConfig.from_pretrained(str(where))
        tokenizer = AutoTokenizer.from_pretrained(str(where))
        chosen = pick_dtype(dtype, device, getattr(config, "dtype", None))
        model: Any = AutoModelForCausalLM.from_pretrained(str(where), dtype=chosen)
    return model.to(device).eval(), tokenizer


def _line(exc: BaseException) -> str:
    """The first line of an error, shortened: hub errors run over many."""
    text = str(exc).strip().splitlines()
    return (text[0] if text else type(exc).__name__)[:200]


def pick_device(device: str | None) -> str:
    """The device asked for, else cuda, else mps, else cpu.

    Raises EngineError where the one asked for is not there.
    """
    if device is None:
        if torch.cuda.is_available():
            return "cuda"
        return "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as exc:  # torch asserts where it was built without CUDA
        raise EngineError(f"device {device!r} is not available here: {_line(exc)}") from exc
    return device


def pick_dtype(dtype: Any, device: str, stored: torch.dtype | None) -> torch.dtype:
    """The number format asked for, else bfloat16; float32 where the weights are stored so or the hardware wants it.

    Raises InvalidInput for a name that is none.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is not None:
        if str(dtype) not in _DTYPES:
            raise InvalidInput(f"dtype {dtype!r} is unknown: use one of {', '.join(_DTYPES)}")
        return _DTYPES[str(dtype)]
    poor = device.startswith("cuda") and not torch.cuda.is_bf16_supported()
    return torch.float32 if poor or stored == torch.float32 else torch.bfloat16


def config_of(model: Any) -> Any:
    """The config of the language model itself, also inside a multimodal one."""
    return model.config.get_text_config(decoder=True)


def window_of(model: Any, window: int | None) -> Window:
    """How many tokens fit: user > model config > default.

    Raises InvalidInput for a window that is none, or that exceeds a table of learned positions.
    """
    config = config_of(model)
    known = getattr(config, "max_position_embeddings", None)
    if window is None:
        return Window(int(known), "model config") if known else Window(DEFAULT_WINDOW, "default")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise InvalidInput(f"window is {window!r}: give a positive number of tokens")
    if known and window > known and getattr(config, "rope_parameters", None) is None:
        raise InvalidInput(f"window {window:,} exceeds the {known:,} positions this model has learned")
    return Window(window, "user")
