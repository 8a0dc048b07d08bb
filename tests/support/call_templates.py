"""Chat templates that write calls as families of models do, each in a few lines."""

from __future__ import annotations


_ASKS = "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
_TURNS = (
    "{{% for message in messages %}}"
    "{{% if message.role == 'assistant' %}}{answers}{{% else %}}{asks}{{{{ '<|im_end|>\\n' }}}}{{% endif %}}"
    "{{% endfor %}}"
    "{{% if add_generation_prompt %}}{{{{ {begins!r} }}}}{{% endif %}}"
)
_QWEN_CALL = (
    '{{ \'<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}"
)
_TAGS = (
    "{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}"
    "{% for key, value in call.function.arguments.items() %}"
    "{{ '<parameter=' + key + '>\\n' }}{{ value if value is string else value | tojson }}{{ '\\n</parameter>\\n' }}"
    "{% endfor %}{{ '</function>\\n</tool_call>' }}"
)
_GEMMA_CALL = (
    "{{ '<|tool_call>call:' + call.function.name + '{' }}"
    "{% for key, value in call.function.arguments | dictsort %}{{ '' if loop.first else ',' }}"
    "{{ key + ':<|\"|>' + value + '<|\"|>' }}{% endfor %}{{ '}<tool_call|>' }}"
)
_LLAMA_CALL = (
    "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}"
)


def _template(begins: str, call: str, ends: str, between: str = "") -> str:
    calls = (
        f"{{{{ {begins!r} + (message.content or '') }}}}"
        f"{{% for call in message.tool_calls or () %}}{{{{ '' if loop.first else {between!r} }}}}{call}{{% endfor %}}"
        f"{{{{ {ends!r} }}}}"
    )
    return _TURNS.format(answers=calls, asks=_ASKS, begins=begins)


QWEN = "<|im_start|>assistant\n"
TEMPLATES = {
    "qwen3": _template(QWEN, _QWEN_CALL, "<|im_end|>\n", "\n"),
    "qwen3_5": _template(QWEN, _TAGS, "<|im_end|>\n", "\n"),
    "gemma4": _template("<|turn>model\n", _GEMMA_CALL, "<turn|>\n"),
    "llama": _template("<|head|>assistant\n\n", _LLAMA_CALL, "<|im_end|>"),
}
"""By the model's type."""
