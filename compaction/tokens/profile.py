"""What a chat template can take, found by rendering marker strings in every field.

Invariant: a profile is a function of the template alone; a field is claimed only where its marker reached the rendered
text, unescaped and in order. What is not claimed is folded into `content` by `compaction.tokens.folding`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count
from typing import Any

__all__ = ["PLAIN", "Render", "TemplateProfile", "probe"]

Render = Callable[[Sequence[Mapping[str, Any]], Sequence[Mapping[str, Any]] | None, bool], str | None]
"""(messages, tools, generation prompt) -> the text as the template writes it, None where it raises."""
_Messages = list[dict[str, Any]]
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LONG_ID, _SHORT_ID = "call_Ab1Cd2Ef3Gh4Ij5Kl6Mn7Op8", "aB3dE5fG7"


@dataclass(frozen=True, slots=True)
class TemplateProfile:
    """What a template takes as it stands; anything else is folded.

    Attributes:
        roles: roles it renders under their own name.
        system: a leading system message. `many_systems`: several of them. `later_system`: one further down, in place.
        parts: roles whose content may be a list of text parts, rendered as their text.
        names: roles whose `name` is rendered.
        null_content: an assistant message with tool calls and `content` null.
        tools: tool schemas, with their names, descriptions and parameters.
        tool_role, tool_calls: results and calls in their own form. `parallel_calls`: several calls in one message.
        content_with_calls: text beside the calls is rendered too.
        arguments_as_dict: `arguments` must be an object; `arguments_as_text`: must be a JSON string.
        short_ids: call ids must be nine letters or digits.
        reasoning: `reasoning_content` of the newest assistant message is rendered.
        drops_reasoning: the reasoning of earlier turns is left out by the template.
        consecutive: equal roles may follow each other; otherwise they are merged (`alternates`).
        user_first: the first message after the system message must be a user's. `needs_user`: there must be one.
        prefix_stable: a further message leaves the text of those before it as it was.
        injects_date: it writes today's date, which is frozen here.
    """

    roles: tuple[str, ...] = ()
    system: bool = False
    many_systems: bool = False
    later_system: bool = False
    parts: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    null_content: bool = False
    tools: bool = False
    tool_role: bool = False
    tool_calls: bool = False
    parallel_calls: bool = False
    content_with_calls: bool = False
    arguments_as_dict: bool = False
    arguments_as_text: bool = False
    short_ids: bool = False
    reasoning: bool = False
    drops_reasoning: bool = False
    consecutive: bool = False
    user_first: bool = True
    needs_user: bool = True
    prefix_stable: bool = False
    injects_date: bool = False

    @property
    def alternates(self) -> bool:
        """Whether user and assistant messages must take turns."""
        return not self.consecutive

    def to_json(self) -> dict[str, Any]:
        """The profile as plain JSON values, in a fixed order."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


PLAIN = TemplateProfile(roles=("user", "assistant"))
"""The least any chat template takes: a user first, then turns, text only."""


def probe(render: Render, *, injects_date: bool) -> TemplateProfile:
    """The profile of a template. Calls `render` some sixty times."""
    return _Probe(render).profile(injects_date)


class _Probe:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._numbers = count(1000)

    def mark(self) -> str:
        """A word that occurs nowhere else."""
        return f"Mark{next(self._numbers)}Zq"

    def shows(self, messages: _Messages, *marks: str, tools: Sequence[Mapping[str, Any]] | None = None) -> bool:
        """Whether the messages render, and all marks with them in this order."""
        text = self._render(messages, tools, True)
        return text is not None and _in_order(text, marks)

    def profile(self, injects_date: bool) -> TemplateProfile:
        system = self._leading(1)
        calls = self._calls()
        return TemplateProfile(
            roles=tuple(role for role in ROLES if self._role(role, system)),
            system=system,
            many_systems=self._leading(2),
            later_system=self._later_system(system),
            parts=tuple(role for role in ROLES if self._parts(role, calls)),
            names=tuple(role for role in ROLES if self._name(role, calls)),
            tools=self._tools(system),
            tool_role=calls.role,
            tool_calls=calls.form is not None,
            null_content=self._null_content(calls),
            parallel_calls=self._parallel(calls),
            content_with_calls=self._content_with_calls(calls),
            arguments_as_dict=calls.form == "dict",
            arguments_as_text=calls.form == "text",
            short_ids=calls.id == _SHORT_ID,
            reasoning=self._reasoning(),
            drops_reasoning=self._drops_reasoning(),
            consecutive=self._consecutive(),
            user_first=self._user_first(system),
            needs_user=self._needs_user(system),
            prefix_stable=self._prefix_stable(calls, system),
            injects_date=injects_date,
        )

    def _leading(self, many: int) -> bool:
        marks = [self.mark() for _ in range(many)]
        user = self.mark()
        return self.shows([*(_text("system", mark) for mark in marks), _text("user", user)], *marks, user)

    def _role(self, role: str, system: bool) -> bool:
        if role == "system":
            return system
        first, own = self.mark(), self.mark()
        if role == "user":
            return self.shows([_text(role, own)], own)
        if role == "developer":
            return self.shows([_text(role, first), _text("user", own)], first, own)
        extra = {"tool_call_id": _SHORT_ID} if role == "tool" else {"name": "f"} if role == "function" else {}
        return self.shows([_text("user", first), {**_text(role, own), **extra}], first, own)

    def _later_system(self, system: bool) -> bool:
        marks = [self.mark() for _ in range(5)]
        roles = ("system", "user", "assistant", "system", "user")
        messages = [_text(role, mark) for role, mark in zip(roles, marks, strict=True)]
        return system and self.shows(messages, *marks)

    def _calls(self) -> _Calls:
        for call_id in (_LONG_ID, _SHORT_ID):
            as_dict, as_text = (self._call(call_id, as_text=flag) for flag in (False, True))
            if as_dict or as_text:
                form = "any" if as_dict and as_text else "dict" if as_dict else "text"
                return _Calls(call_id, form, True)
        marks = [self.mark() for _ in range(4)]
        roles = ("user", "assistant", "tool", "assistant")
        messages = [_text(role, mark) for role, mark in zip(roles, marks, strict=True)]
        messages[2]["tool_call_id"] = _LONG_ID
        return _Calls(_LONG_ID, None, self.shows(messages, *marks))

    def _call(self, call_id: str, *, as_text: bool) -> bool:
        name, key, value, result, reply = (self.mark() for _ in range(5))
        arguments = f'{{"{key}": "{value}"}}' if as_text else {key: value}
        messages: _Messages = [
            _text("user", "go"),
            {"role": "assistant", "content": "", "tool_calls": [_call_of(call_id, name, arguments)]},
            {"role": "tool", "tool_call_id": call_id, "name": name, "content": result},
            _text("assistant", reply),
        ]
        text = self._render(messages, None, True)
        if text is None or not _in_order(text, (name,)) or not _in_order(text, (key, value, result, reply)):
            return False
        return f'"{key}"' in text if as_text else f"'{key}'" not in text

    def _with_calls(self, calls: _Calls, content: str | None, names: Sequence[str]) -> _Messages:
        arguments: Any = "{}" if calls.form == "text" else {}
        made = [_call_of(calls.id[:-1] + str(index), name, arguments) for index, name in enumerate(names)]
        results = [{"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "ok"} for call in made]
        message: dict[str, Any] = {"role": "assistant", "content": content, "tool_calls": made}
        return [_text("user", "go"), message, *results, _text("assistant", "done")]

    def _null_content(self, calls: _Calls) -> bool:
        if calls.form is None:
            return False
        name = self.mark()
        empty = self._with_calls(calls, "", [name])
        null = self._with_calls(calls, None, [name])
        missing = [null[0], {key: value for key, value in null[1].items() if key != "content"}, *null[2:]]
        text = self._render(empty, None, True)
        return text is not None and text == self._render(null, None, True) == self._render(missing, None, True)

    def _parallel(self, calls: _Calls) -> bool:
        names = [self.mark(), self.mark()]
        return calls.form is not None and self.shows(self._with_calls(calls, "", names), *names)

    def _content_with_calls(self, calls: _Calls) -> bool:
        content, name = self.mark(), self.mark()
        return calls.form is not None and self.shows(self._with_calls(calls, content, [name]), content, name)

    def _conversation_with(self, role: str, message: dict[str, Any], calls: _Calls) -> _Messages:
        """A short conversation that ends with the message, legal for its role."""
        if role in ("system", "developer"):
            return [message, _text("user", "go")]
        if role == "user":
            return [message]
        if role == "tool" and calls.form is not None:
            before = self._with_calls(calls, "", ["f"])[:2]
            return [*before, {**message, "tool_call_id": before[1]["tool_calls"][0]["id"]}]
        return [_text("user", "go"), {**message, "tool_call_id": _LONG_ID} if role == "tool" else message]

    def _parts(self, role: str, calls: _Calls) -> bool:
        one, two = self.mark(), self.mark()
        parts = [{"type": "text", "text": one}, {"type": "text", "text": two}]
        single = self._render(self._conversation_with(role, {"role": role, "content": parts[:1]}, calls), None, True)
        string = self._render(self._conversation_with(role, _text(role, one), calls), None, True)
        both = self._conversation_with(role, {"role": role, "content": parts}, calls)
        return single is not None and single == string and one in single and self.shows(both, one, two)

    def _name(self, role: str, calls: _Calls) -> bool:
        name = self.mark()
        text = self._render(self._conversation_with(role, {**_text(role, "x"), "name": name}, calls), None, True)
        return text is not None and name in text

    def _tools(self, system: bool) -> bool:
        name, description, key, user, rules = (self.mark() for _ in range(5))
        schema = {"type": "object", "properties": {key: {"type": "string", "description": "d"}}, "required": [key]}
        tool = {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
        messages = [_text("user", user)]
        if system:
            messages.insert(0, _text("system", rules))
        text = self._render(messages, [tool], True)
        wanted = (name, description, key, user, *((rules,) if system else ()))
        return text is not None and all(mark in text for mark in wanted)

    def _reasoning(self) -> bool:
        thought, said = self.mark(), self.mark()
        message = {**_text("assistant", said), "reasoning_content": thought}
        return self.shows([_text("user", "go"), message], thought, said)

    def _drops_reasoning(self) -> bool:
        """Earlier reasoning is gone, whether it stood in its own field or as <think> in the content."""
        for own_field in (True, False):
            thought, said, user = (self.mark() for _ in range(3))
            content = said if own_field else f"<think>\n{thought}\n</think>\n\n{said}"
            message = _text("assistant", content) | ({"reasoning_content": thought} if own_field else {})
            newest = self._render([_text("user", "go"), message], None, False)
            earlier = self._render([_text("user", "go"), message, _text("user", user)], None, False)
            gone = earlier is not None and newest is not None and thought not in earlier
            if gone and (thought in (newest or "") or not own_field):
                return True
        return False

    def _consecutive(self) -> bool:
        marks = [self.mark() for _ in range(6)]
        roles = ("user", "user", "assistant", "assistant", "user", "user")
        return self.shows([_text(role, mark) for role, mark in zip(roles, marks, strict=True)], *marks)

    def _user_first(self, system: bool) -> bool:
        one, two, three = (self.mark() for _ in range(3))
        start = [_text("assistant", two), _text("user", three)]
        bare = self.shows(start, two, three)
        return not (bare and (not system or self.shows([_text("system", one), *start], one, two, three)))

    def _needs_user(self, system: bool) -> bool:
        mark = self.mark()
        alone = self.shows([_text("assistant", mark)], mark)
        return not (alone and (not system or self.shows([_text("system", mark)], mark)))

    def _prefix_stable(self, calls: _Calls, system: bool) -> bool:
        rules = [_text("system", "rules")] if system else []
        thinking = {**_text("assistant", "<think>\nt\n</think>\n\nsaid"), "reasoning_content": "thought"}
        talk = [_text("user", "a"), thinking, _text("user", "b"), _text("assistant", "c"), _text("user", "d")]
        used = [*self._with_calls(calls, "", ["f"]), *talk] if calls.form is not None else []
        tool = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
        return all(
            _stable(self._render, [*rules, *messages], tools) for messages in (talk, used) for tools in (None, [tool])
        )


@dataclass(frozen=True, slots=True)
class _Calls:
    """How tool calls are taken: with ids such as `id`; `form` of the arguments is "any", "dict", "text", None: not."""

    id: str
    form: str | None
    role: bool


def _stable(render: Render, messages: _Messages, tools: Sequence[Mapping[str, Any]] | None) -> bool:
    texts = [render(messages[:end], tools, False) for end in range(1, len(messages) + 1)]
    known = [text for text in texts if text is not None]
    return all(known[index].startswith(known[index - 1]) for index in range(1, len(known)))


def _in_order(text: str, marks: Sequence[str]) -> bool:
    at = 0
    for mark in marks:
        at = text.find(mark, at)
        if at < 0:
            return False
    return True


def _text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _call_of(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
