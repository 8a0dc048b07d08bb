from collections.abc import Iterator
from typing import Any

import pytest
from support.servers import client_over


TEMPLATE = (
    "{% for tool in tools or () %}{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ raise_exception('no system message, please') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="module")
def client() -> Iterator[Any]:
    """Of a server in this process whose model is called some/tiny, for modules that have none of their own."""
    with client_over(chat_template=TEMPLATE, name="some/tiny") as (client, _):
        yield client
