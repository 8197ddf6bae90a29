"""Who may come in: API keys, what is open without one, pages of other origins, and whose cached prefixes a request may find."""

from __future__ import annotations

import hmac
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from live import Live, live
from scripted import scripted
from wire import JSON, Reply, get, head, post, send

from arctool.errors import UsageError
from arctool.serve import callers
from arctool.serve.callers import Caller, KeyRing
from arctool.serve.problems import Problem
from arctool.serve.settings import KEYS_VARIABLE, MAX_KEY, MAX_KEYS, MIN_KEY, gather_keys

CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
ANNA, BERT, CARL = "key-of-anna", "key-of-bert", "key-of-carl"
ORIGIN = "https://chat.example"
LONG = "A prompt that is longer than some blocks of the cache. " * 3


def bearer(key: str) -> dict[str, str]:
    return {**JSON, "Authorization": f"Bearer {key}"}


def ask(server: Live, headers: Mapping[str, str] = JSON, **more: Any) -> Reply:
    return post(server.port, PLAIN, {"prompt": "Hi", "max_tokens": 2, "temperature": 0, **more}, headers)


def cached(reply: Reply) -> int:
    assert reply.status == 200, reply
    return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.fixture(scope="module")
def guarded() -> Iterator[Live]:
    with live(scripted({"": "yes"}), api_keys=(ANNA, BERT, CARL)) as running:
        yield running


@pytest.mark.parametrize("key", [ANNA, BERT, CARL])
def test_each_key_opens(key: str, guarded: Live) -> None:
    assert ask(guarded, bearer(key)).status == 200
    assert ask(guarded, {**JSON, "x-api-key": key}).status == 200
    assert ask(guarded, {**JSON, "AUTHORIZATION": f"bearer   {key} "}).status == 200
    assert get(guarded.port, "/v1/models", bearer(key)).status == 200


WRONG: list[dict[str, str]] = [
    {},
    {"Authorization": ""},
    {"Authorization": "Bearer"},
    {"Authorization": "Bearer "},
    {"Authorization": f"Basic {ANNA}"},
    {"Authorization": ANNA},
    {"Authorization": f"Bearer {ANNA}x"},
    {"Authorization": f"Bearer {ANNA[:-1]}"},
    {"Authorization": f"Bearer {ANNA.upper()}"},
    {"Authorization": f"Bearer {ANNA},{BERT}"},
    {"Authorization": f"Bearer {ANNA} {BERT}"},
    {"Authorization": "Bearer k\xe9y-of-anna"},
    {"Authorization": "Bearer null", "x-api-key": ANNA},
    {"x-api-key": ""},
    {"x-api-key": f"Bearer {ANNA}"},
    {"Cookie": f"key={ANNA}"},
    {"Authorization": "Bearer " + "k" * 10_000},
]


@pytest.mark.parametrize("headers", WRONG, ids=lambda value: str(value)[:40])
@pytest.mark.parametrize("path", [CHAT, PLAIN, "/tokenize", "/v1/models", "/metrics", "/status", "/openapi.json", "/v1/nothing"])
def test_without_a_key_that_fits_there_is_nothing_to_see(path: str, headers: dict[str, str], guarded: Live) -> None:
    posts = path in (CHAT, PLAIN, "/tokenize")
    reply = post(guarded.port, path, {}, {**JSON, **headers}) if posts else get(guarded.port, path, headers)
    assert reply.status == 401
    assert reply.header("WWW-Authenticate") == "Bearer"
    assert (reply.error["type"], reply.error["code"]) == ("authentication_error", "invalid_api_key")
    assert "key-of" not in reply.error["message"]


def test_a_key_in_the_path_is_none(guarded: Live) -> None:
    assert get(guarded.port, f"/v1/models?api_key={ANNA}&key={ANNA}").status == 401


@pytest.mark.parametrize("path", ["/", "/health", "/ready"])
def test_the_page_and_the_probes_are_open(path: str, guarded: Live) -> None:
    assert get(guarded.port, path).status == 200
    assert get(guarded.port, path, bearer("wrong-key")).status == 200


@pytest.mark.parametrize("path", ["/", "/health", "/page/app.js"])
def test_nobody_without_a_key_is_listened_to_even_at_an_open_place(path: str, guarded: Live) -> None:
    assert post(guarded.port, path, b"[" * 100_000).status == 401
    assert get(guarded.port, path, method="DELETE").status == 401


@pytest.mark.parametrize("path", ["/page/../v1/models", "/page/%2e%2e/v1/models", "/health/../v1/models", "/health/", "//health", "/page"])
def test_an_open_place_is_no_way_around(path: str, guarded: Live) -> None:
    reply = get(guarded.port, path)
    assert reply.status in (401, 404)
    assert b"tiny" not in reply.body


def test_metrics_are_open_where_the_operator_says_so() -> None:
    with live(scripted({"": "yes"}), api_keys=(ANNA,), public_metrics=True) as server:
        assert get(server.port, "/metrics").status == 200
        assert get(server.port, "/status").status == 401


def test_a_refused_body_is_not_read(guarded: Live) -> None:
    asked = send(guarded.port, head("POST", PLAIN, {**JSON, "Content-Length": str(7 << 20), "Expect": "100-continue"}))
    assert asked.status == 401


def test_keys_are_never_written_down(guarded: Live) -> None:
    ask(guarded, bearer(ANNA))
    ask(guarded, bearer("no-key-at-all"))
    assert any(PLAIN in line for line in guarded.logged)
    assert not any("key-of" in line or "no-key" in line for line in [*guarded.logged, *guarded.said])


@pytest.mark.parametrize("sent", [ANNA, BERT, CARL, "wrong-key", ""])
def test_every_digest_is_compared_whoever_asks(sent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = KeyRing((ANNA, BERT, CARL))
    compared: list[tuple[bytes, bytes]] = []

    def count(known: bytes, given: bytes) -> bool:
        compared.append((known, given))
        return hmac.compare_digest(known, given)

    monkeypatch.setattr(callers, "hmac", type("Counting", (), {"compare_digest": staticmethod(count)}))
    if sent in (ANNA, BERT, CARL):
        assert ring.caller({"authorization": f"Bearer {sent}"}).tenant
    else:
        with pytest.raises(Problem):
            ring.caller({"authorization": f"Bearer {sent}"})
    assert len({known for known, _ in compared}) == len(compared) == 3
    assert {len(value) for pair in compared for value in pair} == {32}


def test_callers_are_told_apart_by_names_that_are_no_keys() -> None:
    ring = KeyRing((ANNA, BERT))
    anna, bert = (ring.caller({"x-api-key": key}) for key in (ANNA, BERT))
    assert anna != bert
    assert anna == KeyRing((BERT, ANNA)).caller({"authorization": f"Bearer {ANNA}"})
    assert ANNA not in repr(anna)
    assert KeyRing(()).caller({}) == Caller() == KeyRing(()).caller({"x-api-key": ANNA})


def test_no_two_pairs_of_key_and_salt_make_one_salt() -> None:
    names = ("", "a", "ab", "b", "1:", "1:a", ":", "a:b")
    pairs = [(tenant, own) for tenant in names for own in names]
    salts = {Caller(tenant).salt(own, shared=False) for tenant, own in pairs}
    assert len(salts) == len(pairs)
    assert "" in salts
    assert len({Caller(tenant).salt("own", shared=True) for tenant in names}) == 1
    assert Caller("a").salt("", shared=True) == ""


def test_keys_come_from_the_command_line_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# keys\n\n{BERT}\n  {CARL}  \r\n#{'x' * 20}\n{BERT}\n")
    assert gather_keys((ANNA,), file, {KEYS_VARIABLE: f" first-one , ,second-one,{ANNA}"}) == (ANNA, "first-one", "second-one", BERT, CARL)
    assert gather_keys((), None, {}) == gather_keys((), None, {KEYS_VARIABLE: " , "}) == ()
    with live(scripted({"": "yes"}), api_keys=gather_keys((), file, {})) as server:
        assert [ask(server, bearer(key)).status for key in (BERT, CARL, ANNA, "#" + "x" * 20)] == [200, 200, 401, 401]


@pytest.mark.parametrize(
    "key", ["", "short", "k" * (MIN_KEY - 1), "k" * (MAX_KEY + 1), "with a space", "kéy-of-anna", "key\nof-anna", "tab\tin-key"]
)
def test_a_key_that_cannot_be_one_is_refused_without_being_said(key: str) -> None:
    with pytest.raises(UsageError, match=r"^--api-key: key 2: expected 8 to 512 printable ASCII characters without spaces$"):
        gather_keys((ANNA, key), None, {})


def test_a_file_of_keys_that_holds_none_opens_no_door(tmp_path: Path) -> None:
    empty, binary = tmp_path / "empty", tmp_path / "binary"
    empty.write_text("# nothing yet\n\n")
    binary.write_bytes(b"\xff\xfe")
    for path, words in (
        (empty, "holds no key"),
        (binary, "cannot be read"),
        (tmp_path / "absent", "No such file"),
        (tmp_path, "cannot be read"),
    ):
        with pytest.raises(UsageError, match=f"^--api-key-file: .*{words}"):
            gather_keys((ANNA,), path, {})
    with pytest.raises(UsageError, match=f"at most {MAX_KEYS} keys"):
        gather_keys(tuple(f"key-number-{n}" for n in range(MAX_KEYS + 1)), None, {})


def test_prefixes_are_cached_for_each_key_apart(guarded: Live) -> None:
    assert cached(ask(guarded, bearer(ANNA), prompt=LONG)) == 0
    assert cached(ask(guarded, bearer(BERT), prompt=LONG)) == 0
    own = cached(ask(guarded, bearer(ANNA), prompt=LONG))
    assert own > 16
    assert cached(ask(guarded, {**JSON, "x-api-key": BERT}, prompt=LONG)) == own
    assert cached(ask(guarded, bearer(ANNA), prompt=LONG, cache_salt="mine")) == 0
    assert cached(ask(guarded, bearer(BERT), prompt=LONG, cache_salt="mine")) == 0
    assert cached(ask(guarded, bearer(ANNA), prompt=LONG, cache_salt="mine")) == own
    chat = {"messages": [{"role": "user", "content": LONG}], "max_tokens": 1}
    assert [cached(post(guarded.port, CHAT, chat, bearer(key))) > 0 for key in (ANNA, BERT, ANNA, BERT)] == [False, False, True, True]


def test_an_operator_may_let_keys_share_prefixes_but_salts_separate_still() -> None:
    with live(scripted({"": "yes"}), api_keys=(ANNA, BERT), share_prefix_cache=True) as server:
        assert cached(ask(server, bearer(ANNA), prompt=LONG)) == 0
        assert cached(ask(server, bearer(BERT), prompt=LONG)) > 16
        assert cached(ask(server, bearer(BERT), prompt=LONG, cache_salt="other")) == 0
        assert cached(ask(server, bearer(ANNA), prompt=LONG, cache_salt="other")) > 16


def cross_origin(reply: Reply) -> dict[str, str]:
    return {name: value for name, value in reply.headers if name.startswith("access-control-")}


PREFLIGHT = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}


def test_pages_of_other_origins_get_no_leave_by_default(guarded: Live) -> None:
    asked = get(guarded.port, CHAT, PREFLIGHT, method="OPTIONS")
    assert (asked.status, asked.error["code"]) == (405, "method_not_allowed")
    for reply in (asked, get(guarded.port, "/health", {"Origin": ORIGIN}), ask(guarded, {**bearer(ANNA), "Origin": ORIGIN})):
        assert cross_origin(reply) == {}


def test_pages_of_the_origins_that_the_operator_names_get_leave() -> None:
    with live(scripted({"": "yes"}), api_keys=(ANNA,), cors_origins=(ORIGIN,)) as server:
        asked = get(server.port, CHAT, PREFLIGHT, method="OPTIONS")
        assert asked.status == 200
        assert cross_origin(asked)["access-control-allow-origin"] == ORIGIN
        assert cross_origin(asked)["access-control-allow-headers"] == "authorization,content-type"
        assert "POST" in cross_origin(asked)["access-control-allow-methods"]
        assert "access-control-allow-credentials" not in cross_origin(asked)
        for headers, status in ((bearer(ANNA), 200), (JSON, 401)):  # a page may read why it is refused
            reply = ask(server, {**headers, "Origin": ORIGIN})
            assert reply.status == status
            assert cross_origin(reply)["access-control-allow-origin"] == ORIGIN
            assert str(cross_origin(reply)["access-control-expose-headers"]).lower() == "x-request-id"
        streamed = post(server.port, PLAIN, {"prompt": "Hi", "stream": True}, {**bearer(ANNA), "Origin": ORIGIN})
        assert cross_origin(streamed)["access-control-allow-origin"] == ORIGIN
        for other in ("https://evil.example", "null", "https://chat.example.evil.example", "http://chat.example"):
            refused = get(server.port, CHAT, {**PREFLIGHT, "Origin": other}, method="OPTIONS")
            assert refused.status == 400
            assert "access-control-allow-origin" not in cross_origin(refused)
            assert "access-control-allow-origin" not in cross_origin(ask(server, {**bearer(ANNA), "Origin": other}))
        assert json.loads(get(server.port, "/health").body)["status"] == "ok"
