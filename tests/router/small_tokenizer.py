"""A small tokenizer in a folder, as models have one: byte-level BPE, two special tokens, a chat template."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from tests.router.chats import ODD

STRING = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}</s>{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
PARTS = (
    STRING.replace("{{ m.content | trim }}", "{% for part in m.content %}[{{ part.text }}]{% endfor %}")
    .replace("<s>{{ m.role }}\n", "<s>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}")
    .replace("{% endfor %}{% for c", "{% endfor %}{% endif %}{% for c")
)


IMAGES = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<i>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}</s>{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


def save(
    folder: Path,
    template: str = STRING,
    *,
    words: str = "the word is a word",
    special: tuple[str, ...] = ("<s>", "</s>"),
) -> str:
    """Writes it; other ``words`` make another tokenizer. Returns the folder."""
    tokenizers: Any = importlib.import_module("tokenizers")
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(special),
    )
    backend.train_from_iterator([words, *ODD] * 2, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)
