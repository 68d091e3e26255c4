"""Images, audio and files: what they cost by rule, and what stands for them where a model reads text only.

Invariant: the payload of a blob (base64, a data URI) is never looked at as text: two blobs that differ only in their
payload's characters cost the same, unless the payload is an image whose header states another size.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from compaction.messages import Part, is_blob

__all__ = [
    "AUDIO_TOKENS",
    "FILE_TOKENS",
    "IMAGE_LOW_TOKENS",
    "IMAGE_TOKENS",
    "VIDEO_TOKENS",
    "blob_tokens",
    "part_text",
    "placeholder",
]

IMAGE_LOW_TOKENS = 85
"""An image at `detail: "low"`: the published flat price of OpenAI's tile rule."""
IMAGE_TILE_TOKENS = 170
"""One 512 x 512 tile at `detail: "high"`, on top of `IMAGE_LOW_TOKENS`."""
IMAGE_TOKENS = 1105
"""An image whose size is not known: 85 + 6 tiles, what screenshots from 1,024 x 1,025 to 1,536 x 1,024 come to."""
AUDIO_TOKENS = 600
"""Audio of unknown length: one minute at 10 tokens a second."""
FILE_TOKENS = 2000
"""A file, by a flat figure: two pages as text and image."""
VIDEO_TOKENS = 5000
"""A video, by a flat figure."""

_HEADER_CHARS = 64


class Size(NamedTuple):
    """Pixels of an image."""

    width: int
    height: int


def blob_tokens(part: Part) -> int:
    """Tokens of an image, audio, video or file part, by rule.

    Images follow OpenAI's tile rule where the size stands in the part (`width`, `height`) or in a PNG or GIF header;
    `detail: "low"` costs `IMAGE_LOW_TOKENS`; anything else a flat constant of this module.
    """
    kind = str(part.get("type"))
    if "audio" in kind:
        return AUDIO_TOKENS
    if "file" in kind:
        return FILE_TOKENS
    if "video" in kind:
        return VIDEO_TOKENS
    image = part.get("image_url")
    details: Mapping[str, Any] = image if isinstance(image, Mapping) else {}
    if "low" in (part.get("detail"), details.get("detail")):
        return IMAGE_LOW_TOKENS
    size = _size(part, details, image if isinstance(image, str) else details.get("url"))
    return IMAGE_TOKENS if size is None else _tiles(size)


def placeholder(part: Part) -> str:
    """The text that stands for a blob where the model reads text only, such as `[image]` or `[file: report.pdf]`."""
    kind = str(part.get("type"))
    if "audio" in kind:
        return "[audio]"
    if "video" in kind:
        return "[video]"
    if "file" not in kind:
        return "[image]"
    file = part.get("file")
    name = part.get("filename") or (file.get("filename") if isinstance(file, Mapping) else None)
    return f"[file: {name}]" if isinstance(name, str) and name else "[file]"


def part_text(part: Part) -> str:
    """A content part as text: its text, a placeholder for a blob, compact JSON for a kind that is not known."""
    if is_blob(part):
        return placeholder(part)
    for key in ("text", "refusal", "thinking"):
        if part.get("type") in {key, f"input_{key}", f"output_{key}"} and isinstance(part.get(key), str):
            return str(part[key])
    return json.dumps(dict(part), ensure_ascii=False, separators=(",", ":"))


def _size(part: Part, details: Mapping[str, Any], url: object) -> Size | None:
    for source in (part, details):
        width, height = source.get("width"), source.get("height")
        if isinstance(width, int) and isinstance(height, int) and width > 0 and height > 0:
            return Size(width, height)
    if not isinstance(url, str) or not url.startswith("data:image/"):
        return None
    start = url.find(";base64,") + len(";base64,")
    try:
        head = base64.b64decode(url[start : start + _HEADER_CHARS], validate=True)
    except (binascii.Error, ValueError):
        return None
    return _header_size(head)


def _header_size(head: bytes) -> Size | None:
    if head.startswith(b"\x89PNG\r\n\x1a\n") and len(head) >= 24:
        size = Size(int.from_bytes(head[16:20], "big"), int.from_bytes(head[20:24], "big"))
    elif head[:6] in (b"GIF87a", b"GIF89a") and len(head) >= 10:
        size = Size(int.from_bytes(head[6:8], "little"), int.from_bytes(head[8:10], "little"))
    else:
        return None
    return size if min(size) > 0 else None


def _tiles(size: Size) -> int:
    """OpenAI's published rule: fit into 2048 x 2048, shortest side to 768, then 170 a tile of 512, and 85 once."""
    fit = min(1.0, 2048 / max(size))
    fit *= min(1.0, 768 / (min(size) * fit))
    across, down = (max(1, math.ceil(side * fit / 512)) for side in size)
    return IMAGE_LOW_TOKENS + IMAGE_TILE_TOKENS * across * down
