"""
What requests may ask for. Bodies and options are typed tables, of which the checks, the messages and the description
at `/openapi.json` are made.

    parsing.py        the JSON of a body: names, digits, characters
    counting.py       how many values it has, and how deep they are nested
    kinds.py          types of values: whole numbers, finite numbers, token ids, options that have one value
    options.py        `generation_config`
    decoding.py       options of decoding beside it
    elsewhere.py      options of other servers, with the values that ask for what happens anyway
    prompts.py        prompts of a completion, and the number of choices
    messages.py       messages, their parts and calls, and the items of a response's input
    structured.py     what form an answer must have: JSON, a schema, a grammar
    tools.py          tools, and which one is to be called
    bodies.py         the bodies of the routes for texts
    token_bodies.py   those of the routes for tokens
    variables.py      `chat_template_kwargs`, and the effort of reasoning
    logit_bias.py     `logit_bias`, as an option of `generate`
    templates.py      what of a model's chat template matters to requests: roles, switches, names that it reserves
    checking.py       checks a body, and explains what is wrong with it
    description.py    the bodies and answers in the OpenAPI description
"""

from .bodies import BODIES, LENGTHS, ChatBody, CompletionBody, LoadModelBody, ResponseBody
from .checking import Facts, checked
from .description import describe
from .elsewhere import TAKEN_ALONE
from .messages import normal_items, normal_messages
from .options import options_of
from .parsing import parsed
from .prompts import TokenPrompt, prompts_of
from .structured import grammar_of, told_of, told_place
from .templates import reserved_names, roles_of, switches_of
from .token_bodies import DetokenizeBody, TokenizeBody
from .tools import demanded_tools
from .variables import variables_of


__all__ = [
    "BODIES",
    "ChatBody",
    "CompletionBody",
    "DetokenizeBody",
    "Facts",
    "LENGTHS",
    "LoadModelBody",
    "ResponseBody",
    "TAKEN_ALONE",
    "TokenPrompt",
    "TokenizeBody",
    "checked",
    "demanded_tools",
    "describe",
    "grammar_of",
    "normal_items",
    "normal_messages",
    "options_of",
    "parsed",
    "prompts_of",
    "reserved_names",
    "roles_of",
    "switches_of",
    "told_of",
    "told_place",
    "variables_of",
]
