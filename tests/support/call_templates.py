"""Chat templates that write calls as families of models do, each in a few lines."""

from __future__ import annotations


_ASKS = "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
_TURNS = (
    "{{% for message in messages %}}"
    "{{% if message.role == 'assistant' %}}{answers}{{% else %}}{asks}{{% endif %}}"
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
_ONE = "{% if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
_LLAMA_CALL = (
    '{{ \'{"name": "\' + call.function.name + \'", "parameters": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}' }}"
)

_ARGUMENTS = (
    "{% for key, value in call.function.arguments.items() %}{{ '' if loop.first else ', ' }}"
    "{{ key + '=' }}VALUE{% endfor %}"
)


def _python(value: str) -> str:
    return "{{ call.function.name + '(' }}" + _ARGUMENTS.replace("VALUE", value) + "{{ ')' }}"


_QUOTED = _python("{{ value | tojson }}")
_SINGLE = _python('{{ "\'" + value + "\'" if value is string else value | tojson }}')
_BARE = _python("{{ '%s' | format(value) }}")


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
    "python": _template(QWEN, "{{ '[' if loop.first }}" + _QUOTED + "{{ ']' if loop.last }}", "<|im_end|>\n", ", "),
    "lfm2": _template(
        QWEN,
        "{{ '<|tool_call_start|>[' if loop.first }}" + _SINGLE + "{{ ']<|tool_call_end|>' if loop.last }}",
        "<|im_end|>\n",
        ", ",
    ),
    "llama": _template("<|head|>assistant\n\n", _ONE + _LLAMA_CALL, "<|im_end|>"),
}
"""By the model's type."""


def _shape(begins: str, says: str, call: str, ends: str, between: str = "", asks: str = _ASKS) -> str:
    calls = (
        f"{{% for call in message.tool_calls or () %}}{{{{ '' if loop.first else {between!r} }}}}{call}{{% endfor %}}"
    )
    answers = f"{{{{ {says!r} + (message.content or '') }}}}{calls}{{{{ {ends!r} }}}}"
    return _TURNS.format(answers=answers, asks=asks, begins=begins)


def _headed(first: str, last: str, mark: str, call: str) -> str:
    asks = f"{{{{ '<|{first}|>' + message.role + '<|{last}|>\\n\\n' + (message.content or '') + '<|im_end|>' }}}}"
    begins = f"<|{first}|>assistant<|{last}|>\n\n"
    return _shape(begins, begins + mark, call, "<|im_end|>", asks=asks)


def _listed(call: str, opening: str = "[", closing: str = "]") -> str:
    return f"{{{{ {opening!r} if loop.first }}}}{call}{{{{ {closing!r} if loop.last }}}}"


_THOUGHT = "<think>\n\n</think>\n\n"
_LLAMA3 = "start_header_id", "end_header_id"
SHAPES = {
    "Qwen2.5": ("qwen2", _shape(QWEN, QWEN, _QWEN_CALL, "<|im_end|>\n", "\n")),
    "Qwen3": ("qwen3", _shape(QWEN, QWEN + _THOUGHT, _QWEN_CALL, "<|im_end|>\n", "\n")),
    "Qwen3-Coder": ("qwen3_moe", _shape(QWEN, QWEN, _TAGS, "<|im_end|>\n", "\n")),
    "Qwen3.5": ("qwen3_5", _shape(QWEN + "<think>\n", QWEN + _THOUGHT, _TAGS, "<|im_end|>\n", "\n")),
    "Llama 3.2": ("llama", _headed(*_LLAMA3, "", _ONE + _LLAMA_CALL)),
    "Llama 3.1, marked": ("llama", _headed(*_LLAMA3, "<|python_tag|>", _ONE + _LLAMA_CALL)),
    "Llama 4": ("llama4", _headed("header_start", "header_end", "<|python_start|><|python_end|>", _LLAMA_CALL)),
    "Gemma 4": (
        "gemma4",
        _shape("<|turn>model\n<|channel>thought\n<channel|>", "<|turn>model\n", _GEMMA_CALL, "<turn|>\n"),
    ),
}
"""The model's type, and a chat template that writes calls where and as the published one of these models does."""
_LLAMA = "<|start_header_id|>assistant<|end_header_id|>\n\n"
_ASKED = (
    "{% if tools %}{{ 'Write [func_name1(params_name1=params_value1, params_name2=params_value2...), f(params)].' }}"
    "{% endif %}"
)
PYTHON_SHAPES = {
    "Llama 3.2": (_shape(_LLAMA, _LLAMA, _listed(_BARE), "<|im_end|>", ", "), "[", "]", ", ", '"'),
    "LFM2": (
        _shape(QWEN, QWEN, _listed(_SINGLE, "<|tool_call_start|>[", "]<|tool_call_end|>"), "<|im_end|>\n", ", "),
        "<|tool_call_start|>[",
        "]<|tool_call_end|>",
        ", ",
        "'",
    ),
    "OLMo 3": (
        _shape(QWEN, QWEN, _listed(_QUOTED, "<function_calls>", "</function_calls>"), "<|im_end|>\n", "\n"),
        "<function_calls>",
        "</function_calls>",
        "\n",
        '"',
    ),
    "asked for": (_ASKED + _shape(_LLAMA, _LLAMA, "", "<|im_end|>"), "[", "]", ", ", '"'),
    "asked for, beside JSON": (_ASKED + _shape(_LLAMA, _LLAMA, _ONE + _LLAMA_CALL, "<|im_end|>"), "[", "]", ", ", '"'),
}
"""
A chat template that writes calls in Python as published ones do, or asks for them; what is around them, what is
between two, and what is around strings.
"""
