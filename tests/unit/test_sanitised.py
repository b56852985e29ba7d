"""What of an error's text of the other side may be kept: no id and no secret, and the words that help."""

import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from durable_core.operations.sanitised import LONGEST, code_of, of_error, sanitised
from durable_core.secrets import MASK

SECRETS = (
    "hunter2", "s3cr3t", "op-77", "eyJhbGciOiJIUzI1NiJ9", "sk_live_4242abcd", "0198c0de-aaaa-7bbb-8ccc-1234567890ab",
    "4242424242", "abcdEFGHijkl", "abcdefghijklmnop", "abcdef", "ghijk",
    "AbCdEfGhIjKlMnOpQrStUvWxYzAbCd", "correcthorse", "abcdefgh", "hunter",
)  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "GET https://dana:hunter2@api.example.com/v1/ops/op-77?token=s3cr3t failed",
        "Authorization: Bearer eyJhbGciOiJIUzI1NiJ9 was refused",
        "api_key=sk_live_4242abcd is wrong",
        "password is correcthorse",
        "bad password=correcthorse",
        "wrong api_key=abcdefgh",
        "the login of dana failed: password=hunter",
        'invalid secret "correcthorse"',
        'invalid secret: "abcdefgh correcthorse"',
        "user dana:hunter@host is refused",
        "no route to :hunter@host",
        "no route to amqp://dana:p@correcthorse@host/shop",
        "operation 0198c0de-aaaa-7bbb-8ccc-1234567890ab is gone",
        "account 4242424242 is closed",
        "key AbCdEfGhIjKlMnOpQrStUvWxYzAbCd is unknown",
        "bad answer: {'id': 'op-77', 'password': 'correcthorse'}",
        "bad answer: b'op-77 correcthorse'",
        "bad answer: <html>op-77 correcthorse</html>",
        "first line\nop-77 correcthorse",
        "invalid key: abcdEFGHijkl",
        "api key abcdefghijklmnop invalid",
        "the Key is 'abcdefghijklmnop'",
        "operation op-abcdef-ghijk not found",
        "operation (abcdef) not found",
        "no such resource op-abcdef-ghijk-oak",
        "no such resource sk_live_abcdefghijklmnop",
        "idempotency-key abcdefghijklmnop was used",
        "operationId: abcdef",
        "operation key abcdef is gone",
        "operation id: abcdef",
        "id abcdef is gone, ids abcdef",
        "abcdEFGHijkl is invalid",
    ],
)
def test_no_secret_and_no_id_is_kept_of_an_errors_text(text):
    found = sanitised(text)
    assert found
    for secret in SECRETS:
        assert secret not in found, found


def test_an_id_that_is_known_goes_although_it_looks_like_a_word():
    assert "oak" not in sanitised("branch oak is busy", ["oak"])


def test_what_helps_is_kept():
    found = of_error(ConnectionError("GET https://api.example.com/v1/branches?x=1 said 503: service unavailable"))
    assert found == "ConnectionError: GET https://api.example.com said 503: service unavailable"
    assert sanitised("the bad word is the password") == "the bad word is the password"
    for told in (
        "the operation was not found", "Operation timed out", "operation is not allowed: read-only branch",
        "invalid API key", "Service Unavailable, try-again-later", "key not known", "the id does not exist",
        "operation http://oak.example.com",
    ):  # fmt: skip
        assert sanitised(told) == told
    assert of_error(ValueError()) == "ValueError"
    assert len(sanitised("word " * 1000)) <= LONGEST


def test_an_error_whose_text_raises_is_told_by_its_class():
    class Rude(Exception):
        def __str__(self):
            raise RuntimeError

    assert of_error(Rude()) == "Rude"


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("HTTP Error 404: Not Found", "HTTP Error 404: Not Found"),
        ("HTTP/1.1 503 of api", "HTTP/1.1 503 of api"),
        ("status code 429, wait", "status code 429, wait"),
        ("they answered 503 of all", "they answered 503 of all"),
        ("502 Bad Gateway", "502 Bad Gateway"),
        ("500 Server Error: oops for url: https://api.example.com/x/7", "500 Server Error: oops for url: https://api.example.com"),
        ("timed out after 30 s", "timed out after 30 s"),
        ("timed out after 2.5 seconds", "timed out after 2.5 seconds"),
        ("no route to http://127.0.0.1:8443/x", "no route to http://127.0.0.1:8443"),
    ],
)  # fmt: skip
def test_a_status_of_http_a_duration_and_a_host_are_kept(text, kept):
    assert sanitised(text) == kept


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("operation 7 is gone", "operation *** is gone"),
        ("operation 404 is gone", "operation *** is gone"),
        ("17 and 503, locked", "*** and ***, locked"),
        ("run 9s7 is locked", "run *** is locked"),
        ("branch=oak is locked", "branch=*** is locked"),
        ("branch = 'oak tree' is locked", "branch = *** is locked"),
        ("(branch='oak', run=ash)", "(branch=***, run=***"),
        ("oak.ash=elm", "oak.ash=***"),
        ("door\u0663 is shut", "*** is shut"),
        ("http://api-7.example.com/x is away", "http://***.example.com is away"),
    ],
)
def test_a_number_and_a_named_value_of_the_other_side_are_not(text, kept):
    assert sanitised(text) == kept


@pytest.mark.parametrize("code", ["QUOTA_EXCEEDED", "INSUFFICIENT.FUNDS", "NO-WAY", "HTTP_404", "BUSY"])
def test_a_code_of_words_is_kept(code):
    assert code_of(code, "CALL_FAILED") == code


@pytest.mark.parametrize(
    "code",
    [
        "",
        "op-77",
        "E42",
        "7",
        "HTTP_4040",
        "token=abc",
        "the branch is busy",
        "A" * 25,
        "sk_live_abcdefghijklmnop",
        "insufficient.funds",
        "Busy",
        "QUOTA\n",
        "X_" * 60,
        "OAK/ASH",
    ],
)
def test_a_code_that_may_be_an_id_or_a_text_is_not(code):
    assert code_of(code, "CALL_FAILED") == "CALL_FAILED"


ORDINARY = ("the", "branch", "is", "busy", "and", "refused", "its", "call", "of", "other", "side", "again")
IDS = st.one_of(
    st.text("abcdefgXYZ", min_size=1, max_size=6),
    st.integers(0, 99999).map(str),
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(str.isprintable),
)
AROUND = st.sampled_from(["{}", "'{}'", "({})", "{}:", "{},", "/{}/", "run={}", "#{}", "https://host/{}", "{}."])


@given(ids=st.lists(IDS, min_size=1, max_size=3, unique=True), around=AROUND, data=st.data())
def test_no_id_that_is_handed_over_survives_however_short_and_the_words_around_it_do(ids, around, data):
    """As a whole word, wherever in the sentence; the words around it are those of which no id is a part."""
    ids = [one for one in ids if one.strip() == one and not set(one) <= set(MASK)]
    assume(ids)
    lower = [one.lower() for one in ids]
    ordinary = [word for word in ORDINARY if not any(one in word for one in lower)]
    words = data.draw(st.lists(st.sampled_from(ordinary or ["zoo"]), min_size=2, max_size=8))
    at = data.draw(st.integers(1, len(words)))
    told = " ".join([*words[:at], *(around.format(one) for one in ids), *words[at:]])
    found = sanitised(told, ids)
    rest = found.replace(MASK, "\0")
    for one in ids:
        assert not re.search(rf"(?<!\w){re.escape(one)}(?!\w)", rest), (told, ids, found)
    assert rest.split()[:at] == words[:at], (told, ids, found)


@given(number=st.integers(0, 10**6), name=st.sampled_from(["operation", "branch", "run", "of"]))
def test_no_number_survives_that_nobody_handed_over(number, name):
    assert str(number) not in sanitised(f"{name} {number} is locked by {number}, and {name}={number}; see {number}")


def test_a_word_that_is_cut_in_two_by_the_length_does_not_come_out_as_an_id():
    for pad in range(1, 25):
        found = sanitised("w" * pad + " " + "word " * 56 + "oakley", ["oak"])
        assert found.split()[-1] in ("word", "oakley")
        assert len(found) <= LONGEST


def test_an_id_that_the_read_cuts_in_two_is_not_kept_in_part():
    one = "oak ash " * 60 + "elm"
    assert sanitised(f"{one} " * 10, [one]).strip("* ") == ""
