"""Tiny tokenizers with chat templates in the manner of well-known families, written for these tests."""

from __future__ import annotations

import json
from typing import Any

import pytest

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

# Tools in the system message, calls as JSON, runs of results in one user turn, earlier thinking left out.
QWEN = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{%- endif %}
{{- '<tools>' }}{%- for t in tools %}{{ '\n' }}{{ t | tojson }}{%- endfor %}{{ '\n</tools><|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
{{- '<|im_start|>' + m.role + '\n' + content + '<|im_end|>\n' }}
{%- elif m.role == 'assistant' %}
{%- set thought = m.reasoning_content if m.reasoning_content is string else '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if thought and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}{{ content }}
{%- for c in m.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + c.function.name + '", "arguments": ' }}
{%- if c.function.arguments is string %}{{ c.function.arguments }}{%- else %}{{ c.function.arguments | tojson }}
{%- endif %}{{ '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"""

# Today's date in the system message, contents stripped, one call a message and no text beside it.
LLAMA3 = """{{- bos_token }}{%- set date = strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content'] | trim %}{%- set rest = messages[1:] %}
{%- else %}{%- set system = '' %}{%- set rest = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\n\nToday Date: ' + date + '\n\n' }}
{%- if tools %}{%- for t in tools %}{{ t | tojson }}{{ '\n' }}{%- endfor %}{%- endif %}{{ system + '<|eot_id|>' }}
{%- for m in rest %}
{%- if m.tool_calls %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('only single tool calls') }}{%- endif %}
{%- set f = m.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + f.name + '", "parameters": ' }}
{{- f.arguments | tojson }}{{ '}<|eot_id|>' }}
{%- elif m.role == 'tool' or m.role == 'ipython' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + m.content + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}"""

# Turns must alternate, call ids have nine characters, tools and system message stand before the last user message.
MISTRAL = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set ns = namespace(i=0, last=-1) %}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}
{%- if (m.role == 'user') != (ns.i % 2 == 0) %}{{ raise_exception('roles must alternate') }}{%- endif %}
{%- set ns.i = ns.i + 1 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for m in loop_messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}
{{- '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST]' }}{%- if system is defined and loop.index0 == ns.last %}{{ system + '\n\n' }}{%- endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for c in m.tool_calls %}
{%- if c.id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{%- endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments | tojson + ', "id": "' + c.id + '"}' }}
{%- endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{ raise_exception('ids must have nine characters') }}{%- endif %}
{{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('only user, assistant and tool') }}{%- endif %}
{%- endfor %}"""

# No system role, turns must alternate, nothing but text.
GEMMA = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for m in messages %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set role = 'model' if m['role'] == 'assistant' else m['role'] %}
{{- '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

# Plain text between the turns: nothing stops a merge from reaching over.
ALPACA = """{%- for m in messages %}{{ '### ' + m['role'] + ':\n' + m['content'] + '\n\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{ '### assistant:\n' }}{%- endif %}"""

TEMPLATES = {
    "chatml": CHATML,
    "qwen": QWEN,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
    "alpaca": ALPACA,
    "metaspace": CHATML,
}
SPECIALS = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<start_of_turn>", "<end_of_turn>"),
]
CORPUS = [
    "The order number is 7712 and the user asked for it: please tell me what the result is, thank you.",
    "system user assistant model tool name arguments content Today Date 01 Jan 2025 ### user:\n\n### assistant:\n",
    'def f(x): return {"name": "look_up", "arguments": {"order": x}}\n\n\n    # done',
] * 20


def tokenizer_of(family: str) -> Any:
    """A tokenizer of a few hundred entries with the family's template; "metaspace" splits as sentencepiece does."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    pieces = tokenizers.pre_tokenizers
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    sentencepiece = family == "metaspace"
    backend.pre_tokenizer = (
        pieces.Metaspace(prepend_scheme="first", split=False)
        if sentencepiece
        else pieces.ByteLevel(add_prefix_space=False)
    )
    backend.decoder = tokenizers.decoders.Metaspace() if sentencepiece else tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=["<unk>", *SPECIALS],
        initial_alphabet=[] if sentencepiece else pieces.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    if sentencepiece:
        backend = _with_bytes(tokenizers, backend)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", extra_special_tokens=SPECIALS[2:]
    )
    made.chat_template = TEMPLATES[family]
    return made


def _with_bytes(tokenizers: Any, backend: Any) -> Any:
    """The tokenizer with one ordinary entry for each byte, for what its alphabet lacks."""
    data = json.loads(backend.to_str())
    vocabulary = data["model"]["vocab"]
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    data["model"] |= {"byte_fallback": True, "unk_token": "<unk>"}
    return tokenizers.Tokenizer.from_str(json.dumps(data))
