"""How Qwen3-Coder and GLM write a call: arguments one by one, between tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.gateway.tools.marked_readers import HERMES_CLOSE, HERMES_OPEN, CallHead
from alignedserve.gateway.tools.tags import Rest, Tags, beginnings, spelt


@dataclass(frozen=True)
class Keyed:
    # The start of a call: a mark, or a head with the name as its group.
    openings: Tags
    # The head after a mark, with the name as its group.
    head: CallHead
    # Tags outside of values: an argument up to its value, with the group `key`; the end of the call, with the group
    # `end`; or the start of the next call.
    tags: Tags
    # Ends of a value: its closing tag, or the next argument, with the group `key`.
    value_ends: Tags
    # The rest of a value that is closed before another argument or call begins.
    value: Rest
    # Finds the end of the call in a value without a closing tag.
    call_end: re.Pattern[str]
    # Tags that close calls.
    closings: Sequence[str]
    # The start of an argument. If it continues in an unknown way, the call is text: it would lack that argument.
    argument_opening: str
    # The start of a further call, besides the mark.
    bare_opening: str | None = None
    # Whether a value is on lines of its own.
    has_lines: bool = False


# A tool's name, as clients may define it.
_NAME = "[a-zA-Z0-9_.-]{1,64}"


def _tags(whole: str, *begun: Sequence[str], max_len: int) -> Tags:
    return Tags(re.compile(whole), beginnings(*begun), first="<", max_len=max_len)


def _value_up_to(tag: str, argument_opening: str) -> Rest:
    inner = rf"(?:(?!{HERMES_OPEN}|{argument_opening}).)*?"
    return Rest(re.compile(inner + tag, re.DOTALL), re.compile(inner, re.DOTALL))


_FUNCTION, _FUNCTION_END, _PARAMETER_END = "<function=", "</function>", "</parameter>"
_KEY = r"[^<>\n]{1,256}"
_PARAMETER = [*spelt("<parameter="), _KEY, ">"]
QWEN_CODER = Keyed(
    openings=_tags(
        rf"{HERMES_OPEN}|{_FUNCTION}({_NAME})>",
        spelt(HERMES_OPEN),
        [*spelt(_FUNCTION), _NAME, ">"],
        max_len=100,
    ),
    head=CallHead(
        re.compile(rf"{_FUNCTION}([^<>\n]{{1,64}})>"), beginnings([*spelt(_FUNCTION), r"[^<>\n]{1,64}", ">"])
    ),
    tags=_tags(
        rf"<parameter=(?P<key>{_KEY})>|(?P<end>{_FUNCTION_END}|{HERMES_CLOSE})|{HERMES_OPEN}|{_FUNCTION}",
        _PARAMETER,
        *map(spelt, (_FUNCTION_END, HERMES_CLOSE, HERMES_OPEN, _FUNCTION)),
        max_len=300,
    ),
    value_ends=_tags(
        rf"{_PARAMETER_END}|<parameter=(?P<key>{_KEY})>", spelt(_PARAMETER_END), _PARAMETER, max_len=300
    ),
    value=_value_up_to(_PARAMETER_END, "<parameter="),
    call_end=re.compile(rf"{_FUNCTION_END}|{HERMES_CLOSE}|{HERMES_OPEN}\s*{_FUNCTION}"),
    closings=(_FUNCTION_END, HERMES_CLOSE),
    argument_opening="<parameter=",
    bare_opening=_FUNCTION,
    has_lines=True,
)

# Text between a key and its value is left out, as between arguments.
_ARGUMENT = r"<arg_key>(?P<key>[^<]{0,256})</arg_key>[^<]{0,64}<arg_value>"
_ARGUMENT_BEGUN = [
    *spelt("<arg_key>"),
    "[^<]{0,256}",
    *spelt("</arg_key>"),
    "[^<]{0,64}",
    *spelt("<arg_value>"),
]
_VALUE_END = "</arg_value>"
GLM = Keyed(
    openings=Tags.of(HERMES_OPEN),
    head=CallHead(
        re.compile(rf"({_NAME})\s{{0,64}}(?=<arg_key>|{HERMES_CLOSE})"),
        beginnings(*([_NAME, r"\s{0,64}", *spelt(tag)] for tag in ("<arg_key>", HERMES_CLOSE))),
    ),
    tags=_tags(
        rf"{_ARGUMENT}|(?P<end>{HERMES_CLOSE})|{HERMES_OPEN}",
        _ARGUMENT_BEGUN,
        spelt(HERMES_CLOSE),
        spelt(HERMES_OPEN),
        max_len=400,
    ),
    value_ends=_tags(rf"{_VALUE_END}|{_ARGUMENT}", spelt(_VALUE_END), _ARGUMENT_BEGUN, max_len=400),
    value=_value_up_to(_VALUE_END, "<arg_key>"),
    call_end=re.compile(rf"{HERMES_CLOSE}|{HERMES_OPEN}\s*{_NAME}\s*(?:{HERMES_CLOSE}|\Z)"),
    closings=(HERMES_CLOSE,),
    argument_opening="<arg_key>",
)
