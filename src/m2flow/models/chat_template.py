"""What a tokenizer's chat template makes of a conversation: the same text on every day.

A template may ask for the date (`strftime_now`), and transformers tells it today's. What a run
trains on would follow from the day that it is written on, and an answer that goes on after midnight
from another prompt. So a template is told `DATE`, whenever it asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

DATE = datetime(2024, 7, 26, tzinfo=UTC)
"""What the templates of Llama 3 write where nobody tells them the date."""

_CLOCK = "strftime_now"

_DIRECTIVES = "aAbBcCdDeFgGHIjklmMpPrRSTuUVwWxXyYzZ"
"""Letters of `strftime`; each may have a dash before it, which leaves out padding."""

_STANDING = "".join(
    f"|replace({directive!r}, {DATE.strftime(directive)!r})"
    for letter in _DIRECTIVES
    for directive in (f"%{letter}", f"%-{letter}")
)

_MACRO = f"{{% macro {_CLOCK}(format) %}}{{{{ format{_STANDING} }}}}{{% endmacro %}}\n"
"""In place of the function, since transformers passes none on; its line break is no text."""


def written(
    tokenizer: Any, turns: Sequence[Mapping[str, Any]], options: Mapping[str, Any], **how: Any
) -> str:
    """A conversation as text, in the tokenizer's chat template.

    Args:
        tokenizer: has a template.
        turns: of the conversation.
        options: variables of the template.
        how: further arguments of `apply_chat_template`.
    """
    options, named = dict(options), options.get("chat_template")
    if _CLOCK in str(named or tokenizer.chat_template):
        template = tokenizer.get_chat_template(named, how.get("tools", options.get("tools")))
        options["chat_template"] = _MACRO + template
    text: str = tokenizer.apply_chat_template(list(turns), tokenize=False, **options, **how)
    return text
