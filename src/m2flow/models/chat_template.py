"""What a tokenizer's chat template makes of a conversation: the same text on every day.

A template may ask for the date (`strftime_now`), and transformers tells it today's. What a run
trains on would follow from the day that it is written on, and an answer that goes on after midnight
from another prompt. So a template is told `DATE`, whenever it asks.

An option that a template does not read would change nothing, and is refused (`check_options`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from jinja2 import Environment, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from m2flow.errors import UserError, nearest

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

_ALWAYS_TOLD = {"messages", "add_generation_prompt"}
"""Variables that every conversation has."""

_FUNCTIONS = {"raise_exception", _CLOCK}
"""What transformers has templates call."""


class _Generation(Extension):
    """Reads the block `generation`, which transformers adds to the language, as what is in it."""

    tags = {"generation"}  # noqa: RUF012, jinja2 declares it without ClassVar

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def check_options(
    tokenizer: Any,
    options: Mapping[str, Any],
    tools: Sequence[Mapping[str, Any]] | None = None,
    key: str = "data.chat_options",
) -> None:
    """Refuse options that would not change what a template writes, or not as they say.

    Args:
        tokenizer: has a template.
        options: what the user sets; `chat_template` among them chooses the template itself.
        tools: of which the template is told, and which choose among templates; None for none.
        key: of the options, for messages.

    Raises:
        UserError: the template reads no such variable, one is the text "true" or "false", or the
            template cannot be read.
    """
    if not options:
        return
    chosen, told = options.get("chat_template"), options.get("tools", tools)
    syntax = Environment(extensions=[_Generation, loopcontrols], autoescape=True)
    try:
        parsed = syntax.parse(tokenizer.get_chat_template(chosen, told))
    except (ValueError, TemplateSyntaxError) as error:
        raise UserError(
            "the chat template of the model's tokenizer cannot be read "
            f"({type(error).__name__}: {error})",
            key=key,
            hint="mend the template in the model's folder",
        ) from error
    read = find_undeclared_variables(parsed) - _ALWAYS_TOLD - _FUNCTIONS
    for name, value in options.items():
        if name not in read | {"chat_template"}:
            own = sorted(read - {"tools", "documents"})
            close = nearest(name, own)
            raise UserError(
                "the chat template of the model's tokenizer has no such variable, and would write "
                "the same without it",
                key=key,
                value={name: value},
                expected=f"variables that it reads: {', '.join(own)}" if own else "none",
                hint=f"did you mean {close!r}?" if close else "take it out",
            )
        if isinstance(value, str) and value.lower() in ("true", "false"):
            raise UserError(
                "is a text, and every text counts as true in a template",
                key=key,
                value={name: value},
                expected=f"{name}: {value.lower()}, without quotation marks",
            )


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
