"""What a pulse says, and where it may lie; no worker and no server is asked."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.concurrency.solo import TaskPool as SoloPool
from celery.concurrency.thread import TaskPool as ThreadPool

from durable_core import pulse
from durable_core.celery_binding.pulse import Heart
from durable_core.pulse import Pulse, State, Verdict
from tests.celery.nodes import wait_until

NOW = 10_000.0


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(pulse.FOLDER_VARIABLE, str(tmp_path / "pulses"))
    return pulse.folder()


IDLE = Pulse(
    worker="mail@box", app="shop", pid=os.getpid(), space=pulse.space(), began=pulse.began(os.getpid()), at=NOW,
    state=State.CONSUMING, since=NOW - 500, turned_at=NOW,
    runs_tasks_itself=False, waits_for_broker=False, active=0, slots=2, taken_at=NOW - 400, queues=("durable.mail",),
)  # fmt: skip


@pytest.mark.parametrize(
    ("differently", "verdict", "live", "says"),
    [
        ({}, Verdict.IDLE, True, "idle; it reads durable.mail"),
        ({"active": 2}, Verdict.BUSY, True, "at work in 2 of 2 slots"),
        ({"state": State.STARTING}, Verdict.BROKER_AWAITED, True, "waits for its broker since 500 s"),
        ({"state": State.RECONNECTING}, Verdict.BROKER_LOST, True, "alive but not consuming: it lost its broker 500 s"),
        ({"state": State.ENDING}, Verdict.ENDING, True, "told to end"),
        ({"turned_at": NOW - 14}, Verdict.IDLE, True, "idle"),
        ({"turned_at": NOW - 59}, Verdict.LOOP_STUCK, True, "its main loop has not turned for 59 s"),
        ({"turned_at": NOW - 16}, Verdict.LOOP_STUCK, True, "alive but not consuming: its main loop has not turned"),
        ({"turned_at": NOW - 61}, Verdict.LOOP_STUCK, False, "its main loop has not turned for 61 s"),
        (
            {"turned_at": NOW - 9000, "waits_for_broker": True},
            Verdict.BROKER_SILENT,
            True,
            "broker that is silent for 9000 s",
        ),
        ({"turned_at": NOW - 9, "waits_for_broker": True}, Verdict.IDLE, True, "idle"),
        # A solo pool runs the task in that loop; a prefork pool does not.
        ({"turned_at": NOW - 61, "active": 1, "runs_tasks_itself": True}, Verdict.BUSY, True, "at work in 1"),
        ({"turned_at": NOW - 61, "active": 1}, Verdict.LOOP_STUCK, False, "has not turned"),
        # Under gevent the loop cannot tell.
        ({"turned_at": None}, Verdict.IDLE, True, "idle"),
        ({"at": NOW - 14}, Verdict.IDLE, True, "idle"),
        ({"at": NOW - 16}, Verdict.PULSE_STOPPED, False, "is stopped, or hangs: its pulse is 16 s old"),
        ({"at": NOW - 16, "pid": 2**22 + 1}, Verdict.PULSE_STOPPED, False, "is gone"),
        # The machine has started since: this process of that number is another one.
        ({"at": NOW + 5}, Verdict.PULSE_STOPPED, False, "is gone"),
    ],
)
def test_what_a_pulse_says(differently, verdict, live, says):
    read = pulse.judge(replace(IDLE, **differently), NOW)
    assert (read.verdict, read.live) == (verdict, live)
    assert says in read.says
    assert read.consuming == (verdict in (Verdict.IDLE, Verdict.BUSY))


@pytest.mark.parametrize(
    ("differently", "lying", "verdict"),
    [
        ({}, {"durable.mail": 3}, Verdict.MESSAGES_LIE),
        ({}, {"durable.mail": 0}, Verdict.IDLE),
        ({}, {"durable.other": 3}, Verdict.IDLE),
        ({"taken_at": NOW - 14}, {"durable.mail": 3}, Verdict.IDLE),
        ({"active": 1}, {"durable.mail": 3}, Verdict.MESSAGES_LIE),
        ({"active": 2}, {"durable.mail": 3}, Verdict.BUSY),
        ({"state": State.RECONNECTING}, {"durable.mail": 3}, Verdict.BROKER_LOST),
    ],
)
def test_messages_that_nobody_takes_tell_an_idle_worker_from_one_that_consumes_nothing(differently, lying, verdict):
    read = pulse.with_lying(pulse.judge(replace(IDLE, **differently), NOW), lying)
    assert read.verdict is verdict
    assert read.live


def test_a_pulse_is_found_by_its_whole_name_and_by_its_first_part(place):
    place = pulse.made_folder()
    mail, _ = [pulse.write(replace(IDLE, worker=worker), place) for worker in ("mail@box", "slow/../odd@box")]
    assert [one.worker for one in pulse.named(pulse.read_all(), None)] == ["mail@box", "slow/../odd@box"]
    assert [one.worker for one in pulse.named(pulse.read_all(), "mail")] == ["mail@box"]
    assert [one.worker for one in pulse.named(pulse.read_all(), "slow/../odd@box")] == ["slow/../odd@box"]
    assert {path.parent for path in place.parent.rglob("*.json")} == {place}, "a name leads to no other folder"
    assert pulse.named(pulse.read_all(), "mai") == []
    pulse.forget(mail)
    assert [one.worker for one in pulse.read_all()] == ["slow/../odd@box"]


def test_pulses_that_nobody_wrote_for_an_hour_are_taken_away_whoevers_they_are(place):
    """Of another container nobody can tell whether its process 1 runs, and here one always does."""
    place = pulse.made_folder()
    for worker, age in (("lives", 0), ("killed", 3500), ("long ago", 3700), ("ahead", -3700), ("behind", -3500)):
        elsewhere = replace(IDLE, worker=worker, pid=1, space="another container", began=None)
        os.utime(pulse.write(elsewhere, place), (time.time() - age,) * 2)
    half, kept = place / "half.fresh", place / "mine.txt"
    for path in (half, kept):
        path.touch()
        os.utime(path, (0, 0))
    pulse.tidy(place)
    assert {one.worker for one in pulse.read_all()} == {"lives", "killed", "behind"}
    assert (half.exists(), kept.exists()) == (False, True)


def lies_here(place, **differently):
    now = time.monotonic()
    pulse.write(replace(IDLE, **{"at": now, "turned_at": now, "since": now} | differently), place)


def verdicts(worker=None, app=None):
    return [(read.pulse and read.pulse.app, read.verdict) for read in pulse.judged(worker, app)]


def test_two_apps_with_a_worker_of_one_name_have_a_pulse_each(place):
    place = pulse.made_folder()
    lies_here(place)
    lies_here(place, app="crm", state=State.RECONNECTING)
    assert verdicts("mail") == [("crm", Verdict.BROKER_LOST), ("shop", Verdict.IDLE)]
    assert verdicts("mail", "shop") == [("shop", Verdict.IDLE)]
    assert verdicts("mail", "named otherwise") == verdicts("mail")
    assert [read.says.split(":")[0] for read in pulse.judged("mail")] == ["mail@box of crm", "mail@box of shop"]


def test_a_worker_that_was_killed_and_started_again_is_judged_by_its_new_pulse(place):
    place = pulse.made_folder()
    before = {"pid": 2**22 + 1, "at": time.monotonic() - 100}
    lies_here(place, **before)
    assert verdicts("mail") == [("shop", Verdict.PULSE_STOPPED)]
    lies_here(place)
    assert verdicts("mail") == [("shop", Verdict.IDLE)]
    # What another app's worker of that name left behind is told all the same: it has not come back.
    lies_here(place, app="crm", **before)
    assert verdicts("mail") == [("crm", Verdict.PULSE_STOPPED), ("shop", Verdict.IDLE)]


def test_a_worker_that_is_stopped_is_told_beside_another_of_its_name(place):
    place = pulse.made_folder()
    parent = os.getppid()
    lies_here(place, pid=parent, began=pulse.began(parent), at=time.monotonic() - 100)
    lies_here(place)
    assert verdicts("mail") == [("shop", Verdict.IDLE), ("shop", Verdict.PULSE_STOPPED)]


def test_a_process_that_has_the_number_of_one_that_is_gone_is_not_taken_for_it(place):
    place = pulse.made_folder()
    lies_here(place, began=1, at=time.monotonic() - 100)
    (read,) = pulse.judged("mail")
    assert (read.verdict, "is gone" in read.says) == (Verdict.PULSE_STOPPED, True)


def test_a_process_that_has_ended_and_that_nobody_has_waited_for_is_gone():
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        wait_until(lambda: pulse.began(child.pid) is None, "it has ended")
    finally:
        child.wait()


def test_pulses_of_other_containers_in_a_shared_volume_are_theirs(place):
    """Both are process 1 of a worker of that name; each is asked for by its own container."""
    place = pulse.made_folder()
    lies_here(place, pid=1, space="another container", began=None)
    (read,) = pulse.judged("mail")
    assert (read.verdict, read.live) == (Verdict.PULSE_MISSING, False)
    assert "is of another container" in read.says
    lies_here(place, pid=1, state=State.ENDING)
    assert verdicts("mail") == [("shop", Verdict.ENDING)]
    assert len(pulse.read_all()) == 2, "neither writes over the other"


def test_what_is_no_pulse_is_passed_over(place):
    pulse.made_folder()
    (place / "a.json").write_text("{")
    (place / "b.json").write_text(json.dumps({"worker": "b"}))
    assert pulse.read_all() == []
    (read,) = pulse.judged("b")
    assert (read.verdict, read.live) == (Verdict.PULSE_MISSING, False)


def test_a_folder_that_others_may_write_to_is_refused(place):
    place.mkdir(parents=True)
    place.chmod(0o777)
    with pytest.raises(pulse.NoFolder, match=pulse.FOLDER_VARIABLE):
        pulse.made_folder()
    place.rmdir()
    place.symlink_to(place.parent)
    with pytest.raises(pulse.NoFolder):
        pulse.made_folder()


def test_the_folder_that_is_named_may_be_anybodys(place):
    """A volume of a container belongs to root, and all may write to it."""
    place.parent.mkdir()
    place.parent.chmod(0o777)
    assert (pulse.made_folder(), place.stat().st_mode & 0o777) == (place, 0o700)


def test_a_worker_works_on_without_a_pulse(place, caplog, monkeypatch):
    """As on a full disk: its name is too long for a file."""
    worker = SimpleNamespace(hostname="x" * 300, app=Celery(), pool_cls=SoloPool, pool=None, concurrency=8)
    monkeypatch.setattr(pulse, "WRITTEN_EVERY", 0.01)
    heart = Heart(worker)
    heart.start()
    try:
        wait_until(lambda: "pulse_not_written" in caplog.messages, "it says so")
        time.sleep(0.1)
    finally:
        heart.stop()
    assert caplog.messages.count("pulse_not_written") == 1, "once, and not each time"


@pytest.mark.parametrize(("pool", "size", "slots"), [(SoloPool, None, 1), (ThreadPool, None, 8), (ThreadPool, 3, 3)])
def test_a_worker_has_as_many_slots_as_its_pool(place, pool, size, slots):
    """Of a solo pool Celery knows the processors of the machine; a pool that is scaled knows better than its option."""
    worker = SimpleNamespace(
        hostname="mail@box", app=Celery(), pool_cls=pool, pool=SimpleNamespace(num_processes=size), concurrency=8
    )
    heart = Heart(worker)
    heart.start()
    try:
        wait_until(pulse.read_all, "a pulse")
    finally:
        heart.stop()
    assert heart._now().slots == slots


def test_without_the_variable_it_is_a_folder_of_this_user_alone(monkeypatch, tmp_path):
    monkeypatch.delenv(pulse.FOLDER_VARIABLE)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    place = pulse.made_folder()
    assert (place.name, place.stat().st_mode & 0o777) == (f"durable-{os.getuid()}", 0o700)


def run_module(*line, program="-m"):
    command = [sys.executable, program, "durable_core.probe", *line]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_quick_form_answers_in_one_line_and_with_its_exit_code():
    missing = run_module("--live", "--worker", "mail")
    assert (missing.returncode, len(missing.stdout.splitlines())) == (6, 1)
    assert "[PULSE_MISSING]" in missing.stdout
    now = time.monotonic()
    pulse.write(replace(IDLE, at=now, turned_at=now, since=now), pulse.made_folder())
    found = run_module("--live", "--worker", "mail")
    assert found.returncode == 0
    assert found.stdout == "live: mail@box of shop: idle; it reads durable.mail [IDLE]\n"
    answer = json.loads(run_module("--live", "--json").stdout)
    assert (answer["ok"], answer["asked"], answer["workers"][0]["verdict"]) == (True, "live", "IDLE")


def test_the_quick_form_imports_no_library():
    program = (
        "import sys\nfrom durable_core import probe\nprobe.main(['--live'])\n"
        "print(sorted({'sqlalchemy', 'celery', 'click', 'psycopg', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "line",
    [("--worker",), ("--odd",), (), ("--live", "--odd")],
    ids=["half an option", "unknown", "none", "one too many"],
)
def test_what_the_quick_form_does_not_know_the_command_does(line):
    done = run_module(*line)
    assert done.returncode == 2
    assert "--" in done.stderr
    assert not done.stdout


def test_the_names_of_the_package_are_there_when_they_are_asked_for():
    program = (
        "import durable_core\n"
        "assert set(durable_core.__all__) <= set(dir(durable_core))\n"
        "[getattr(durable_core, name) for name in durable_core.__all__]\n"
        "assert durable_core.wakes.carrier() is None\n"
        "from durable_core import *\n"
        "assert delivery is durable_core.delivery and deliveries.get\n"
        "assert not hasattr(durable_core, 'nothing')\n"
        "print(durable_core._HOMES.keys() | {'deliveries', 'operations', 'plans'} == set(durable_core.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("True\n", "")
