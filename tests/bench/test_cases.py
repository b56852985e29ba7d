"""What the benchmark of cases measures, at a small size: that all of it runs, and what it counts; no time is held."""

from bench import cases


def test_the_benchmark_of_cases_runs_and_what_it_counts_is_within_its_limits(services):
    found = cases.run(services.database_url, entries=300, repeats=2)
    counted = {
        cost.what: cost for cost in found if cost.limit is not None and not cost.what.endswith("ratio of the two")
    }
    assert len(counted) == 3
    for cost in counted.values():
        assert cost.value <= cost.limit, cost
    assert all(cost.value > 0 for cost in found if cost.limit != 0)
    table = cases.table(found)
    assert "1,001 affordances over 200 elements" in table
    assert len(cases.verdicts(found)) == 5
