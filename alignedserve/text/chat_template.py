"""Chat templates: Jinja text that turns a list of messages into the prompt format that a model was trained on.

Templates are downloaded with models, so they run in Jinja's sandbox. Beyond Jinja itself they may use the extensions of
transformers: `raise_exception`, `strftime_now`, `tojson`, loop controls, and the `generation` block.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from alignedserve.text.control_tokens import ControlTokens
from alignedserve.text.template_marks import Breaking, Marker, harmless_chats

Message = Mapping[str, Any]

# A template with this test must get None for a turn without content. For other templates such a turn lacks the key.
_TESTS_NONE = re.compile(r"""content['"\]]*\s+is\s+(not\s+)?none""", re.IGNORECASE)


class ChatRejected(ValueError):
    """A chat template rejects the messages. `is_own`: the reason is the template's own text, and not Jinja's or
    Python's, which only those who can read the template understand."""

    def __init__(self, where: str, reason: str, is_own: bool) -> None:
        what = f"{where}: the chat template rejects these messages"
        super().__init__(f"{what}: {reason}")
        # The message for clients of a server.
        self.for_clients = str(self) if is_own else what


class _Raised(jinja2.TemplateError):
    """An error that a template raises itself."""


class ChatTemplates:
    """A model's templates by name. Most have one, `default`; some have another one for chats with tools."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], where: str) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._where = where
        # Results of `_composed`, by template.
        self._found_composed: dict[str, frozenset[str] | None] = {}

    def render(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None, **variables: Any
    ) -> str:
        """Renders the prompt. Raises ValueError if there is no template, or if it rejects the messages, and
        MemoryError."""
        source = self.source(has_tools=bool(tools))
        return self._render(source, None, {"messages": messages, "tools": tools, **variables})

    def render_marked(
        self,
        control: ControlTokens,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        **variables: Any,
    ) -> str:
        """Renders the prompt with marks at the template's own control tokens. Raises the same as `render`."""
        source = self.source(has_tools=bool(tools))
        values = {"messages": messages, "tools": tools, **variables}
        composed = self._composed(source, control)
        if composed is None:
            return self._put_together(source, None, values, control, frozenset(control.ids))
        return self._put_together(source, control, values, control, composed)

    def _put_together(
        self,
        source: str,
        marks: ControlTokens | None,
        values: dict[str, Any],
        control: ControlTokens,
        others: frozenset[str],
    ) -> str:
        """`others`: the template's control tokens that it does not mark itself."""
        if not others:
            return self._render(source, marks, values)
        try:
            breaking = Breaking(others, values)
            values = breaking.broken(values)
        except (ValueError, RecursionError) as error:
            raise ChatRejected(self._where, str(error), isinstance(error, ValueError)) from error
        text = self._render(source, marks, values, breaking.whole)
        return breaking.whole(control.mark_also(text, others))

    def _composed(self, source: str, control: ControlTokens) -> frozenset[str] | None:
        """Returns the control tokens that the template composes instead of containing them literally; None if it can't
        be marked."""
        if source not in self._found_composed:
            self._found_composed[source] = self._compose(source, control)
        return self._found_composed[source]

    def _compose(self, source: str, control: ControlTokens) -> frozenset[str] | None:
        found: set[str] = set()
        for messages, variables in harmless_chats():
            values = {"messages": messages, "add_generation_prompt": True, **variables}
            try:
                plain = self._render(source, None, values)
            except ValueError:
                continue
            try:
                marked = self._render(source, control, values)
            except ValueError:
                return None
            if control.unmarked(marked) != plain:
                return None
            found |= set(control.in_text(marked, is_marked=False))
        return frozenset(found)

    def _render(
        self,
        source: str,
        marks: ControlTokens | None,
        values: Mapping[str, Any],
        whole: Callable[[str], str] = str,
    ) -> str:
        """`whole` removes from an error text what was inserted into `values`. Raises ValueError, and MemoryError."""
        checked = _checked(values["messages"])
        template = _compile(source, marks)
        named = self._special_tokens
        if marks:
            named = {name: marks.marked(token) for name, token in named.items()}
        try:
            messages = _fitting(checked, source)
            given = {"documents": None, **named, **values, "tools": list(values["tools"] or ()) or None}
            try:
                return template.render(given, messages=messages)
            except MemoryError:
                raise
            except Exception:
                if not any(_lacks_content(message) for message in messages):
                    raise
                # The template may need a text in each turn.
                filled = [m | {"content": ""} if _lacks_content(m) else m for m in messages]
                return template.render(given, messages=filled)
        except MemoryError:
            raise
        except Exception as error:
            # The template is foreign code: any exception means that it rejects these messages.
            reason = whole(str(error) or type(error).__name__)
            reason = marks.unmarked(reason) if marks else reason
            raise ChatRejected(self._where, reason, isinstance(error, _Raised)) from error

    @cached_property
    def with_tools(self) -> str | None:
        """Returns the template for chats with tools; None if it would ignore them."""
        template = self._templates.get("tool_use") or self._templates.get("default")
        if template is None:
            return None
        names = meta.find_undeclared_variables(_environment().parse(template))
        return template if "tools" in names else None

    def source(self, has_tools: bool) -> str:
        """Returns the template that renders chats. Raises ValueError if there is none."""
        if not self._templates:
            raise ValueError(
                f"{self._where} has no chat template; looked for chat_template.jinja and "
                "chat_template in tokenizer_config.json"
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" not in self._templates:
            raise ValueError(
                f"{self._where} has the chat templates {', '.join(sorted(self._templates))}; "
                "must have one named default"
            )
        return self._templates["default"]


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    if isinstance(messages, str) or not messages:
        raise ValueError(f"messages is {messages!r}; must be a list of at least one message")
    return [_plain(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _plain(message: Message, name: str) -> dict[str, Any]:
    """Returns the message with its content as one text. Raises ValueError."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name}: messages of a chat must be objects with a role")
    # Clients send `content: null` beside tool calls, and templates test whether a key exists.
    present = {key: value for key, value in message.items() if value is not None}
    content = present.get("content")
    if isinstance(content, list):
        present["content"] = "\n".join(text_of_part(part, name) for part in content)
    elif "content" in present and not isinstance(content, str):
        raise ValueError(f"{name}.content: must be a string or list")
    return present


def _fitting(messages: list[dict[str, Any]], source: str) -> list[dict[str, Any]]:
    """Returns the messages with None as content if the template tests for it."""
    if not _TESTS_NONE.search(source):
        return messages
    return [m | {"content": None} if _lacks_content(m) else m for m in messages]


def _lacks_content(message: Message) -> bool:
    """Whether it is an assistant's turn that only calls tools. Other turns must have content."""
    return message["role"] == "assistant" and message.get("content") is None


def text_of_part(part: object, name: str) -> str:
    """Returns the text of one of OpenAI's content parts, in the message `name`. Raises ValueError."""
    match part:
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": str(kind)} if kind != "text":
            raise ValueError(
                f"{name}.content: a part of type {kind!r:.100} is not supported: the model takes text only"
            )
    raise ValueError(f"{name}.content: must be a string, or a list of parts of type text")


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text for training, and is ignored here."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_OPTIONS: dict[str, Any] = {
    "trim_blocks": True,
    "lstrip_blocks": True,
    "extensions": [loopcontrols, _GenerationBlock],
}


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(**_OPTIONS)


class _MarkingEnvironment(ImmutableSandboxedEnvironment):
    _marks: ControlTokens

    @classmethod
    def of(cls, marks: ControlTokens) -> _MarkingEnvironment:
        made = cls(**_OPTIONS)
        made._marks = marks
        return made

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed = super()._parse(source, name, filename)
        marked: nodes.Template = Marker(self._marks.marked).visit(parsed)
        return marked


@lru_cache(maxsize=32)
def _compile(template: str, marks: ControlTokens | None) -> jinja2.Template:
    environment = _environment() if marks is None else _MarkingEnvironment.of(marks)
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(template)
    except MemoryError:
        raise
    except Exception as error:
        # Besides Jinja's own errors, Python's compiler may reject the code that Jinja generated.
        raise ValueError(f"the chat template is not valid Jinja: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise _Raised(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    # Jinja's own filter escapes for HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)
