"""What a client is told when something is wrong: one small value, and the body that each protocol wraps it in.

Nothing of a request's content is echoed but names of fields and short, printable samples of values; nothing of our insides is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from arctool.errors import RequestError
from arctool.run.async_engine import EngineBusy, EngineStopped

RETRY_SECONDS = 1
FIELD = re.compile(r"([A-Za-z_][\w.\[\]]{0,200}): ")
MAX_MESSAGE = 1000


@dataclass(eq=False)
class Problem(Exception):
    """An answer that is an error. `param`: the field that is to blame; `code`: a word for programs, in OpenAI's use."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def renamed(self, names: Mapping[str, str]) -> Problem:
        """With the names that the client knows for fields that the engine calls otherwise."""
        name = names.get(self.param or "")
        if name is None:
            return self
        return replace(self, param=name, message=f"{name}: {self.message.removeprefix(f'{self.param}: ')}")


def of_request(error: RequestError) -> Problem:
    """A request that the engine refuses; its message begins with the field's name."""
    found = FIELD.match(str(error))
    param = found[1] if found else None
    code = "context_length_exceeded" if "context" in str(error) and param in ("prompt", "max_tokens", "messages") else None
    return Problem(400, str(error), param=param, code=code)


@contextmanager
def spelled(spell: Callable[[str], str]) -> Iterator[None]:
    """Refusals within are raised as Problems that call fields what the client calls them: `spell` is given our name of each."""
    try:
        yield
    except (Problem, RequestError) as error:
        problem = error if isinstance(error, Problem) else of_request(error)
        if problem.param is None or (name := spell(problem.param)) == problem.param:
            raise
        raise problem.renamed({problem.param: name}) from error


def of_error(error: Exception) -> Problem | None:
    """The answer to an error that is no fault of ours; None for one that is."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, RequestError):
        return of_request(error)
    if isinstance(error, EngineBusy):
        return Problem(503, str(error), "overloaded_error", code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, EngineStopped):
        return unavailable(outside(str(error)))
    return None


def outside(text: str) -> str:
    """What a client is told of what the engine says: that it failed, not the words of whatever went wrong in it. The log has those."""
    return text.partition(": ")[0] if text.startswith("the engine ") else text


def unavailable(message: str) -> Problem:
    """The server lives, but cannot answer now."""
    return Problem(503, message, "service_unavailable", code="unavailable", headers={"Retry-After": str(RETRY_SECONDS)})


def internal(request_id: str) -> Problem:
    """A fault of ours: the client learns which line of the log tells more, not what is in it."""
    return Problem(500, f"internal error; the server's log has more under request {request_id}", "internal_error")


def openai_body(problem: Problem) -> bytes:
    """{"error": {...}} as OpenAI's clients read it."""
    error = {"message": problem.message[:MAX_MESSAGE], "type": problem.type, "param": problem.param, "code": problem.code}
    return json.dumps({"error": error}).encode()


ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_body(problem: Problem) -> bytes:
    """{"type": "error", "error": {...}} as Anthropic's clients read it."""
    kind = ANTHROPIC_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    details = {} if problem.code is None else {"details": {"error_code": problem.code}}
    return json.dumps({"type": "error", "error": {"type": kind, "message": problem.message[:MAX_MESSAGE], **details}}).encode()


def body_for(path: str, problem: Problem) -> bytes:
    """The error in the protocol of the endpoint that was asked."""
    return anthropic_body(problem) if path.startswith("/v1/messages") else openai_body(problem)
