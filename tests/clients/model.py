"""The demo model with a chat template that has a place for tools, so that clients can call functions.

The model has not learned to call any, so calls are required, and grammars write them. To the model, a tool's result is
a question.
"""

from __future__ import annotations

import json
from pathlib import Path

from alignedserve import demo

# The marker tells how calls are written. It is not shown to the model, whose prompt stays as in training.
TEMPLATE = (
    '{%- if tools and false -%}<tool_call>{"name": <name>, "arguments": <object>}</tool_call>{%- endif -%}'
    "{%- for message in messages -%}"
    "{{- '<|' + ('user' if message['role'] == 'tool' else message['role']) + '|>' -}}"
    "{{- (message['content'] or '') + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def make_model(directory: Path) -> Path:
    """Returns `directory`, which the model's other files are linked into."""
    for file in demo.MODEL_DIR.iterdir():
        if file.name != "tokenizer_config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((demo.MODEL_DIR / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return directory
