"""What is read of a request about a document before any database is asked."""

import json

import pytest
from starlette.datastructures import Headers

from durable_core.documents.problems import KINDS, Problem
from durable_core.documents.wire import (
    asked_to_replace,
    asked_to_restore,
    asked_to_save,
    if_match,
    parsed,
    refuse_cross_site,
    require_json,
    tags,
    unchanged,
)
from durable_core.documents.writes import MOST_WRITES, Writes
from durable_core.errors import DefinitionError

SAVE_ID = "0199c0de-0000-4000-8000-000000000001"


def refused(call, *given):
    with pytest.raises(Problem) as caught:
        call(*given)
    return caught.value.reason


def headers(**named):
    return Headers({name.replace("_", "-"): value for name, value in named.items()})


# --- the version ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    ['"41"', 'W/"41"', '  "41" ', '"41", W/"41"', '"41-gzip"', 'W/"41;gzip"', '"41--gzip"', '"41-br", "41"'],
)
def test_a_tag_is_a_version_whatever_a_proxy_made_of_it(sent):
    assert if_match(headers(if_match=sent)) == 41


@pytest.mark.parametrize(
    "sent",
    ["41", '"forty-one"', '"041"', '"-1"', '"4.1"', '""', "", '"41', '"41","42"', '*, "41"', 'w/"41"', '"41" "42"',
     f'"{2**63}"', '"٤١"'],
)  # fmt: skip
def test_a_header_that_names_no_one_version_is_refused(sent):
    assert refused(if_match, Headers(raw=[(b"if-match", sent.encode())])) == "version-malformed"


def test_the_star_names_no_version():
    assert if_match(headers(if_match="*")) is None
    assert refused(asked_to_replace, headers(if_match="*"), {}) == "version-required"


def test_the_largest_version_is_one():
    assert if_match(headers(if_match=f'"{2**63 - 1}"')) == 2**63 - 1


def test_a_list_may_stand_in_several_lines():
    assert tags(['"1", "2"', 'W/"3"']) == ["1", "2", "3"]
    assert tags(['"a,b"']) == ["a,b"], "a comma inside a tag ends none"


@pytest.mark.parametrize(
    ("sent", "known"),
    [('"41"', True), ('W/"41"', True), ('"40", "41-gzip"', True), ("*", True), ('"40"', False), ('"4"', False),
     ("41", False), ('"x"', False)],
)  # fmt: skip
def test_a_reader_who_has_the_version_is_known(sent, known):
    assert unchanged(headers(if_none_match=sent), 41) is known
    assert not unchanged(headers(), 41)


@pytest.mark.parametrize("version", [-1, 2**63, "3", 1.0, True, None, [3], {}])
def test_a_version_in_a_body_is_a_whole_number(version):
    body = {"expected_version": version, "content": {}}
    assert refused(asked_to_save, headers(), body) == "version-malformed"
    assert refused(asked_to_replace, headers(if_match='"3"'), body) == "version-malformed"


def test_both_forms_may_be_sent_and_must_agree():
    body = {"expected_version": 3, "content": {"a": 1}}
    assert asked_to_save(headers(if_match='"3"'), body).by_header
    assert not asked_to_save(headers(), body).by_header
    assert refused(asked_to_save, headers(if_match='"4"'), body) == "versions-disagree"
    assert refused(asked_to_replace, headers(if_match='W/"4"'), body) == "versions-disagree"


def test_version_0_is_a_version():
    assert asked_to_save(headers(), {"expected_version": 0, "content": {}}).expected_version == 0
    assert asked_to_replace(headers(if_match='"0"'), {}).expected_version == 0


# --- what is asked --------------------------------------------------------------------------------


def test_content_with_something_else_is_a_mixed_update():
    body = {"expected_version": 3, "content": {}, "folder": "archive"}
    assert refused(asked_to_save, headers(), body) == "mixed-update"
    assert refused(asked_to_replace, headers(), body) == "mixed-update"
    assert refused(asked_to_save, headers(), {"content": {}, "folder": "archive"}) == "mixed-update"
    assert refused(asked_to_save, headers(), {"expected_version": 3, "folder": "archive"}) == "malformed"


def test_a_body_of_a_put_is_the_content_unless_it_names_the_version():
    plain = asked_to_replace(
        headers(if_match='"3"', idempotency_key=f'"{SAVE_ID}"'), {"content": "a field", "save_id": 1}
    )
    assert (plain.wanted, plain.save_id) == ({"content": "a field", "save_id": 1}, SAVE_ID)
    formed = asked_to_replace(headers(), {"expected_version": 3, "content": {"a": 1}, "save_id": SAVE_ID.upper()})
    assert (formed.wanted, formed.save_id) == ({"a": 1}, SAVE_ID)


@pytest.mark.parametrize("save_id", ["once", "", 7, True, ["x"], {}])
def test_a_save_id_is_a_uuid(save_id):
    assert refused(asked_to_save, headers(), {"expected_version": 3, "content": {}, "save_id": save_id}) == "malformed"


def test_without_content_there_is_nothing_to_save_and_without_a_version_nothing_to_restore():
    assert refused(asked_to_save, headers(), {"expected_version": 3}) == "malformed"
    assert refused(asked_to_restore, headers(), {"expected_version": 3}) == "malformed"
    assert refused(asked_to_restore, headers(), {"version": 3}) == "version-required"
    assert refused(asked_to_restore, headers(), {"version": True, "expected_version": 3}) == "version-malformed"


# --- JSON -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"", b"nothing", b"[]", b"3", b"null", b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b'{"a": 1, "a": 2}',
        b'{"b": [{"a": 1, "a": 1}]}', b'{"a": "\\u0000"}', b'{"a\\u0000": 1}', b'{"a": "\\ud800"}', b"\xff\xfe{}",
        b"\xef\xbb\xbf{}", b'{"a": 9223372036854775808}', b'{"a": ' + b"9" * 5000 + b"}", b"{'a': 1}", b'{"a": 1} {}',
        b'{"a": ' * 200_000, b"[" * 500_000, b'{"a": ' * 40 + b"1" + b"}" * 40,
    ],
    ids=lambda body: repr(body[:20]),
)  # fmt: skip
def test_json_that_could_not_be_stored_as_it_is_is_refused(body):
    assert refused(parsed, body) == "malformed"


def test_content_may_be_as_deep_as_any():
    content = json.loads('{"a":' * 32 + "1" + "}" * 32)
    assert parsed(json.dumps({"content": content}).encode()) == {"content": content}


def test_a_refusal_of_json_shows_none_of_its_values():
    with pytest.raises(Problem) as caught:
        parsed(b'{"password": "hunter2", "n": hunter2}')
    assert "hunter2" not in caught.value.detail


# --- where it comes from --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sent", "passes"),
    [
        ({}, True),
        ({"sec_fetch_site": "same-origin", "origin": "https://notes.example.com"}, True),
        ({"sec_fetch_site": "none"}, True),
        ({"origin": "https://notes.example.com"}, True),
        ({"origin": "https://app.example.com", "sec_fetch_site": "same-site"}, True),
        ({"origin": "https://APP.example.com/"}, True),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
        ({"sec_fetch_site": "cross-site", "origin": "https://notes.example.com"}, False),
        ({"origin": "https://evil.example"}, False),
        ({"origin": "https://notes.example.com.evil.example"}, False),
        ({"origin": "null"}, False),
        ({"origin": ""}, False),
        ({"origin": "http://[bad"}, False),
    ],
)
def test_a_write_from_a_page_of_another_site_is_refused(sent, passes):
    given = headers(host="notes.example.com", **sent)
    if passes:
        refuse_cross_site(given, {"https://app.example.com"})
    else:
        assert refused(refuse_cross_site, given, {"https://app.example.com"}) == "cross-site"


@pytest.mark.parametrize(
    "media", ["application/json", "Application/JSON; charset=UTF-8", 'application/json;charset="utf-8"']
)
def test_json_is_taken(media):
    require_json(headers(content_type=media))


@pytest.mark.parametrize(
    "sent",
    [
        {}, {"content_type": "text/plain"}, {"content_type": "application/x-www-form-urlencoded"},
        {"content_type": "multipart/form-data; boundary=application/json"}, {"content_type": "application/jsonp"},
        {"content_type": "text/plain; application/json"}, {"content_type": "application/json; charset=utf-16"},
        {"content_type": "application/merge-patch+json"},
        {"content_type": "application/json", "content_encoding": "gzip"},
    ],
)  # fmt: skip
def test_what_a_form_of_another_site_could_send_is_refused(sent):
    assert refused(require_json, headers(**sent)) == "unsupported-media-type"


# --- how often ------------------------------------------------------------------------------------


def counted(writes, user):
    """Whether one more write of this user passes, and what is said if not."""
    try:
        writes.count(user).send(None)
    except StopIteration:
        return None
    except Problem as problem:
        return problem
    raise AssertionError("a count in memory waits for nothing")


def test_a_user_may_write_120_times_a_minute_and_the_next_is_told_when():
    writes = Writes("brief", MOST_WRITES)
    assert [counted(writes, "dana") for _ in range(120)] == [None] * 120
    one_too_many = counted(writes, "dana")
    assert (one_too_many.reason, one_too_many.status) == ("too-many-writes", 429)
    assert 1 <= int(one_too_many.headers["Retry-After"]) <= 60
    assert counted(writes, "eve") is None, "each user has a count of their own"
    assert counted(Writes("note", MOST_WRITES), "dana") is None


def test_a_rate_that_is_none_is_refused_where_the_router_is_made():
    with pytest.raises(DefinitionError):
        Writes("brief", "often")


def test_every_problem_has_a_status_of_http_and_a_title():
    assert all(400 <= kind.status < 600 and kind.title for kind in KINDS.values())
