"""YAML of recipes and of `config.yaml`: numbers as people write them, text that stays itself.

Promises: a number is decimal (`010` is ten, `1e-4` a number), or hexadecimal or binary by its
prefix; nothing counts in sixties. A number knows how it was written, so that where text is due
`name: 010` is the text `010`. What `to_yaml` writes, `NumberLoader` and other readers of YAML 1.1
and 1.2 read as it was.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"

_INT = re.compile(r"[-+]?(?:0b_*[01][01_]*|0x_*[0-9a-fA-F][0-9a-fA-F_]*|[0-9][0-9_]*)$")
_FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?"
    r"|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.(?:inf|Inf|INF))$"
    r"|\.(?:nan|NaN|NAN)$"
)


class _Written:
    """A number whose text is what was written."""

    text: str

    def __str__(self) -> str:
        return self.text


class WrittenInt(_Written, int):
    """A whole number."""


class WrittenFloat(_Written, float):
    """A number that need not be whole."""


def plain(value: Any) -> Any:
    """A value in which no number knows how it was written."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [plain(inner) for inner in value]
    if isinstance(value, WrittenInt):
        return int(value)
    return float(value) if isinstance(value, WrittenFloat) else value


class NumberLoader(yaml.SafeLoader):
    """Reads numbers as this module says, and all else as YAML 1.1."""


class _Dumper(yaml.SafeDumper):
    """Quotes text that a reader could take for a number."""


NumberLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (INT, FLOAT)]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _class in (NumberLoader, _Dumper):
    _class.add_implicit_resolver(INT, _INT, list("-+0123456789"))
    _class.add_implicit_resolver(FLOAT, _FLOAT, list("-+.0123456789"))


def _int(loader: NumberLoader, node: yaml.ScalarNode) -> int:
    written = loader.construct_scalar(node)
    digits = written.replace("_", "").lower()
    number = WrittenInt(digits, 16 if "0x" in digits else 2 if "0b" in digits else 10)
    number.text = written
    return int(number) if repr(number) == written else number


def _float(loader: NumberLoader, node: yaml.ScalarNode) -> float:
    number = WrittenFloat(loader.construct_yaml_float(node))
    number.text = loader.construct_scalar(node)
    return float(number) if repr(number) == number.text else number


NumberLoader.add_constructor(INT, _int)
NumberLoader.add_constructor(FLOAT, _float)


def to_yaml(document: Mapping[str, object]) -> str:
    """A document as YAML, in the order given."""
    return yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False
    )
