"""From a conversation to the text that a model continues: its own chat template, rendered in a sandbox."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import meta
from jinja2.exceptions import TemplateError

from arctool.errors import RequestError, SourceError
from arctool.run.template_meter import MAX_ELEMENTS
from arctool.run.template_sandbox import MeteredEnvironment, raise_exception
from arctool.run.tokenizer import CONFIG_FILE, json_asset

TEMPLATE_FILE = "chat_template.jinja"
MAX_TEMPLATE = 100_000
MAX_DATE_FORMAT = 1000
ROLES = ("system", "developer", "user", "assistant", "tool")

Message = Mapping[str, Any]


class ChatTemplate:
    """One model's template. Rendering is pure but for the clock that `strftime_now` reads."""

    def __init__(self, source: str, special: Mapping[str, str], now: Callable[[], datetime] = datetime.now) -> None:
        """`special`: named special tokens that the template may use. Raises SourceError if the template does not compile."""
        if len(source) > MAX_TEMPLATE:
            raise SourceError(f"chat template: expected at most {MAX_TEMPLATE} characters, found {len(source)}")
        self._environment = MeteredEnvironment()
        self._environment.globals["raise_exception"] = raise_exception
        self._environment.globals["strftime_now"] = lambda form: _date(now(), form)
        self._special = dict(special)
        self._source = source
        try:
            self._template = self._environment.from_string(source)
        except Exception as error:  # a stranger's text: whatever Jinja and Python's compiler make of it, it is no template
            raise SourceError(f"chat template: does not compile: {_reason(error)}") from error

    @property
    def source(self) -> str:
        """The template's own text."""
        return self._source

    def render(self, messages: Sequence[Message], /, *, add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt for `messages`. Raises RequestError if they are malformed, or the template refuses, fails or runs away.

        `variables` are the template's to read; messages and special tokens they cannot replace.
        """
        check_messages(messages)
        for name in variables:
            if name in ("messages", "self") or name in self._special:
                raise RequestError(f"variables: {name!r:.60} is not a caller's to set")
        self._environment.restart()
        context = {**self._special, **variables, "messages": list(messages), "add_generation_prompt": add_generation_prompt}
        pieces: list[str] = []
        size = 0
        try:
            for piece in self._template.generate(context):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_ELEMENTS:
                    raise RequestError(f"chat template: more than {MAX_ELEMENTS} characters of output")
        except RequestError:
            raise
        except Exception as error:  # a stranger's program: any failure of it is this request's, never the engine's
            raise RequestError(f"chat template: {_reason(error)}") from error
        return "".join(pieces)


def template_variables(source: str) -> frozenset[str]:
    """The names that a template takes from outside, wherever it reads them: `tools` is among them where it has a place for tools.

    Names that it only sets itself, attributes and words in its text are not. Raises SourceError if it does not compile.
    """
    environment = MeteredEnvironment()
    try:
        return frozenset(meta.find_undeclared_variables(environment.parse(source)))
    except Exception as error:  # as in ChatTemplate
        raise SourceError(f"chat template: does not compile: {_reason(error)}") from error


def load_template(assets: Mapping[str, bytes], special: Mapping[str, str]) -> ChatTemplate | None:
    """The model's template, from chat_template.jinja or tokenizer_config.json; None if it has none. Raises SourceError."""
    if TEMPLATE_FILE in assets:
        try:
            return ChatTemplate(assets[TEMPLATE_FILE].decode("utf-8"), special)
        except UnicodeDecodeError as error:
            raise SourceError(f"{TEMPLATE_FILE}: expected UTF-8: {error}") from error
    source = json_asset(assets, CONFIG_FILE).get("chat_template")
    if isinstance(source, list):
        source = _named(source)
    if source is None:
        return None
    if not isinstance(source, str):
        raise SourceError(f"{CONFIG_FILE}: chat_template: expected a text, found a {type(source).__name__}")
    return ChatTemplate(source, special)


def _named(templates: list[Any]) -> Any:
    """The template called "default" of a list of {name, template}."""
    for entry in templates:
        if isinstance(entry, Mapping) and entry.get("name") == "default":
            return entry.get("template")
    raise SourceError(f"{CONFIG_FILE}: chat_template: expected an entry named default in the list")


def check_messages(messages: Any) -> None:
    """Raise RequestError, by index and field, unless `messages` is a conversation."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError("messages: expected a list with at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise RequestError(f"messages[{i}]: expected an object with role and content, found a {type(message).__name__}")
        if message.get("role") not in ROLES:
            raise RequestError(f"messages[{i}].role: expected one of {', '.join(ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise RequestError(f"messages[{i}].content: expected a text, found a {type(content).__name__}")


def _date(now: datetime, form: Any) -> str:
    if not isinstance(form, str) or len(form) > MAX_DATE_FORMAT:
        raise TemplateError(f"strftime_now: expected a text of at most {MAX_DATE_FORMAT} characters")
    return now.strftime(form)


def _reason(error: BaseException) -> str:
    """One bounded line that says what went wrong."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    lines = str(error).splitlines()
    text = lines[0] if lines else ""
    return (text or type(error).__name__)[:300]
