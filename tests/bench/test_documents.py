"""The benchmark of documents at a small size: that all of it runs, and what it counts; no time is held."""

import json
import subprocess
import sys
from pathlib import Path

from bench import documents

ROOT = Path(__file__).parents[2]
SAVES = 8


def test_the_benchmark_of_documents_runs_and_counts_what_a_save_is(tmp_path):
    """On servers of its own, as a person starts it: one writer and writers apart have no conflict, and a save is three
    statements and one transaction."""
    lines = tmp_path / "documents.jsonl"
    asked = ["--documents", "--saves", str(SAVES), "--rounds", "1", "--json", str(lines)]
    done = subprocess.run(
        [sys.executable, "-m", "bench", *asked], cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr

    found = [documents.Measured(**_without_record(line)) for line in lines.read_text().splitlines()]
    asked_for = [(workload.name, by) for workload in documents.WORKLOADS for by in documents.CANDIDATES]
    assert [(one.workload, one.candidate) for one in found] == asked_for
    assert documents.table(found) in done.stdout
    assert " - |" not in documents.table(found), "a cell is empty"
    alone = [one for one in found if one.workload != "one document, 4 writers"]
    assert {one.conflicts for one in alone} == {0}
    assert [one.statements for one in alone] == [1, 1, 3] * 2
    # Of two turns: autovacuum may have come by in one, and its transactions count too.
    assert min(one.transactions for one in alone if one.candidate == documents.OURS) == 1
    # The revision is the second copy of the content, and the row another.
    assert all(one.wal_bytes > 2 * documents.CONTENT_BYTES for one in found if one.candidate != documents.BARE)


def test_ratios_are_against_the_bare_update_of_the_same_round():
    turns = [
        documents.Measured("one", by, nth, per_second, 0.0, 1.0, 1.0, 1.0)
        for by, rates in ((documents.OURS, (50.0, 5.0, 40.0)), (documents.BARE, (100.0, 10.0, 100.0)))
        for nth, per_second in enumerate(rates)
    ]
    assert documents.ratio(turns[::-1], "one", documents.OURS) == 0.5
    assert documents.ratio(turns, "one", documents.BARE) == 1.0


def _without_record(line):
    measured = json.loads(line)
    assert measured.pop("record") == "documents"
    return measured
