"""Tokenizers that need no download: bytes, and a model's own special tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BEGIN, END = "<pad>", "<s>", "</s>"


def build_tokenizer(
    special: Sequence[str],
    *,
    words: Sequence[str] = (),
    named: Mapping[str, str] | None = None,
    chat_template: str,
) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose ordinary tokens are the 256 bytes.

    Args:
        special: Tokens beyond padding, begin and end, which get the first ids, in this order.
        words: Strings that are one token each, without being special.
        named: Special tokens by the attribute names under which processors look for them.
        chat_template: Jinja source.
    """
    control = [PAD, BEGIN, END, *special]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*control, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(control)
    tokenizer.add_tokens(list(words))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BEGIN,
        eos_token=END,
        extra_special_tokens=dict(named or {}),
        model_max_length=8192,
    )
    fast.chat_template = chat_template
    return fast


def chat_template(image: str = "", video: str = "", audio: str = "") -> str:
    """Return a template that puts each item where the message has it, and ends each message.

    vLLM does not find Gemma 3's images again where a line break follows them at once, which no
    published template does.

    Args:
        image: What stands for an image; empty for models without.
        video: For a video.
        audio: For an audio clip.
    """
    return (
        "{{ '<s>' }}{% for message in messages %}{{ message['role'] + ': ' }}"
        "{% if message['content'] is string %}{{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}"
        f"{{% if part['type'] == 'image' %}}{{{{ {image!r} }}}}"
        f"{{% elif part['type'] == 'video' %}}{{{{ {video!r} }}}}"
        f"{{% elif part['type'] == 'audio' %}}{{{{ {audio!r} }}}}"
        "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
        "{{ '</s>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
