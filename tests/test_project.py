"""What holds for the project as a whole: the direction of imports, one table of states, honest SQL and exports."""

import ast
import importlib
import pkgutil
import re
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import create_engine, text

import durable_core
from durable_core.database import guards, migrate
from durable_core.database.statements import Statements, use_schema
from durable_core.states import DELIVERY_MOVES, PRUNED, TERMINAL, DeliveryState
from durable_core.sweeps import SWEEPS
from durable_core.testing import create_database, drop_database

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "durable_core"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if "versions" not in path.parts)
SQL_FILES = sorted(PACKAGE.rglob("*.sql"))

# From the words, which know nothing, to what drives everything. A module imports its own layer and those before it.
LAYERS: list[tuple[str, ...]] = [
    ("errors", "refusals", "document_refusals", "states", "retry", "secrets", "arguments", "kinds", "pulse"),
    ("database",),
    ("wakes", "tracing", "logging"),
    ("claims",),
    ("deliveries",),
    ("plans", "operations", "cases", "documents"),
    ("periodic",),
    ("sweeps",),
    ("doctor",),
    ("celery_binding",),
    ("ready", "local", "testing", "exporter"),
    ("demo", "proof", "cli", "probe"),
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}
BROKER = {"celery", "kombu", "billiard", "redis"}
MAY_KNOW_THE_BROKER = {"celery_binding", "local", "cli", "demo", "testing", "proof"}


def layer_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return parts[0]


def imported(path: Path) -> set[str]:
    """Absolute names of everything a file imports, wherever in the file, types-only imports included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                names.add(f"{node.module}.{alias.name}")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    mine = layer_of(path)
    if mine == "__init__":
        return
    assert mine in RANK, f"{mine} has no place in the order of layers"
    for name in imported(path):
        if not name.startswith("durable_core."):
            continue
        theirs = name.split(".")[1]
        if theirs in RANK:
            assert RANK[theirs] <= RANK[mine], f"{path.name} ({mine}) imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_celery_and_its_kin_are_imported_by_the_binding_and_what_drives_it(path):
    if layer_of(path) not in MAY_KNOW_THE_BROKER:
        assert not {name.split(".")[0] for name in imported(path)} & BROKER


def test_importing_the_package_imports_no_celery_and_configures_nothing():
    import subprocess
    import sys

    code = (
        "import sys, logging, durable_core;"
        "print(sorted({'celery', 'kombu', 'billiard', 'redis'} & set(sys.modules)), logging.root.handlers,"
        " durable_core.wakes.carrier())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[] [] None"


# --- states ----------------------------------------------------------------------------------------


def test_what_make_test_leaves_out_proves_no_numbered_case():
    left_out = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                marks = {ast.unparse(one).removeprefix("pytest.mark.").split("(")[0] for one in node.decorator_list}
                if "long" in marks:
                    left_out.append(node.name)
                    assert not marks & {"spec", "field"}, node.name
    assert left_out


def test_the_guards_in_the_migration_are_the_table_of_states():
    for guard in guards.GUARDS:
        assert guard.path.read_text(encoding="utf-8") == guard.sql()


def test_the_page_of_state_machines_is_the_table_of_states():
    assert guards.DOCS.read_text(encoding="utf-8") == guards.docs_page()


def test_the_page_of_celery_names_every_sweep():
    page = (ROOT / "docs" / "celery.md").read_text(encoding="utf-8")
    assert [sweep.task for sweep in SWEEPS if f"`{sweep.task}`" not in page] == []


def words(sql: str) -> set[str]:
    return set(re.findall(r"'(\w+)'", sql))


def test_the_constraints_and_triggers_of_a_live_database_are_the_table_of_states(engine):
    with engine.connect() as tx:
        definition = dict(
            tx.execute(
                text(
                    "select conname, pg_get_constraintdef(oid) from pg_constraint"
                    " where conrelid = 'durable.deliveries'::regclass"
                )
            ).all()
        )
        source = "select prosrc from pg_proc where oid = cast(:of as regproc)"
        guard = tx.scalar(text(source), {"of": "durable.guard_delivery"})
        holds = tx.scalar(text(source), {"of": "durable.holds_together"})
        triggers = set(tx.scalars(text("select tgname from pg_trigger where tgenabled = 'O' and not tgisinternal")))
        pruned = tx.scalar(text("select pg_get_indexdef('durable.deliveries_finished'::regclass)"))
    assert "durable.holds_together(" in definition["holds_together"]
    states = {rule: words(when) for when, rule in re.findall(r"when (.*?)then '(\w+)'", holds, re.DOTALL)}
    assert states["state_is_known"] == set(DeliveryState)
    assert states["finished_exactly_when_terminal"] == TERMINAL
    assert words(pruned) == set(PRUNED)
    assert set(re.findall(r"when '(\w+ -> \w+)'", guard)) == {f"{m.source} -> {m.target}" for m in DELIVERY_MOVES}
    guards_of_tables = {"guard_delivery", "guard_journal", "guard_operation", "guard_plan", "guard_receipt"}
    guards_of_cases = {"guard_case", "guard_case_commit", "guard_case_entry", "guard_case_event"}
    guards_of_documents = {"guard_document", "guard_document_revision", "guard_document_revision_written"}
    assert triggers == {
        "check_delivery", "guard_truncate", *guards_of_tables, *guards_of_cases, *guards_of_documents
    }  # fmt: skip


@pytest.mark.parametrize("guard", [guards.PLAN, guards.OPERATION], ids=lambda guard: guard.contract)
def test_the_constraints_of_plans_and_operations_are_their_tables_of_states(engine, guard):
    table = f"{guard.contract}s"
    with engine.connect() as tx:
        rows = tx.execute(
            text("select conname, pg_get_constraintdef(oid) from pg_constraint where conrelid = cast(:of as regclass)"),
            {"of": f"durable.{table}"},
        ).all()
        source = tx.scalar(
            text("select prosrc from pg_proc where oid = cast(:of as regproc)"),
            {"of": f"durable.guard_{guard.contract}"},
        )
        pruned = tx.scalar(text(f"select pg_get_indexdef('durable.{table}_finished'::regclass)"))
    definition = dict(rows)
    assert words(definition["state_is_known"]) == set(guard.states)
    assert words(definition["finished_exactly_when_terminal"]) == words(pruned) == guard.terminal
    assert set(re.findall(r"when '(\w+ -> \w+)'", source)) == {f"{m.source} -> {m.target}" for m in guard.moves}


# --- SQL -------------------------------------------------------------------------------------------


def statements_of(path: Path):
    try:
        return list(Statements(path))
    except ValueError:
        return []


# The demo's shop brings a schema of its own; its statements are tested with it.
NAMED = [
    pytest.param(path, statement, id=f"{path.relative_to(PACKAGE).with_suffix('')}:{statement.name}")
    for path in SQL_FILES
    if "migrations" not in path.parts and layer_of(path) != "demo"
    for statement in statements_of(path)
]


def defines(statement) -> bool:
    """Whether it is a definition, which cannot be prepared: installing the test clock runs these."""
    lines = statement.source.splitlines()
    first = next(line for line in lines if line.strip() and not line.startswith("--"))
    return first.split()[0].lower() in {"create", "drop", "alter"}


PREPARED = [named for named in NAMED if not defines(named.values[1])]


def as_prepared(statement) -> str:
    """The statement with $1, $2… for its parameters, each name one number."""
    numbers: dict[str, int] = {}

    def number(match):
        return f"${numbers.setdefault(match.group(1), len(numbers) + 1)}"

    body = re.sub(r"%\((\w+)\)s", number, statement.driver).replace("%%", "%")
    return body


@pytest.fixture(scope="module")
def migrated_schemas(services):
    """One database with the schema under two names, and the test clock in each."""
    from durable_core.testing import MovableClock

    url = create_database(services.database_url, "durable_prepare")
    engine = create_engine(url)
    for schema in ("durable", "work_2"):
        use_schema(schema)
        migrate.migrate(engine)
        MovableClock(engine).install()
    use_schema("durable")
    driver = psycopg.connect(url.set(drivername="postgresql").render_as_string(hide_password=False), autocommit=True)
    yield driver
    driver.close()
    engine.dispose()
    drop_database(services.database_url, "durable_prepare")


@pytest.mark.parametrize("schema", ["durable", "work_2"])
@pytest.mark.parametrize(("path", "statement"), PREPARED)
def test_every_statement_prepares_against_the_migrated_schema(migrated_schemas, path, statement, schema):
    try:
        use_schema(schema)
        sql = as_prepared(statement)
    finally:
        use_schema("durable")
    migrated_schemas.execute(f"prepare one as {sql}".encode())
    migrated_schemas.execute("deallocate one")


@pytest.mark.parametrize("path", SQL_FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_sql_file_lies_beside_the_act_that_runs_it(path):
    if "migrations" in path.parts or path.name == "clock.sql":
        return
    assert path.with_suffix(".py").exists()


@pytest.mark.parametrize(("path", "statement"), NAMED)
def test_a_statement_that_writes_says_what_was_before_and_what_is_after(path, statement):
    lines = [line for line in statement.source.splitlines() if line.startswith("--")]
    body = "\n".join(line for line in statement.source.splitlines() if not line.lstrip().startswith("--"))
    moves = re.search(r"\b(update|insert into|delete from)\s+durable\.", body)
    if moves is not None and path.name not in ("clock.sql",):
        told = "\n".join(lines)
        assert re.search(r"^-- (before|after):", told, re.MULTILINE), f"{statement.name} tells neither before nor after"
    if re.search(r"for (no key )?update", body):
        assert re.search(r"^-- locks:", "\n".join(lines), re.MULTILINE), f"{statement.name} hides its locks"


@pytest.mark.parametrize(("path", "statement"), NAMED)
def test_no_statement_asks_for_the_start_of_its_transaction_instead_of_the_clock(path, statement):
    body = "\n".join(line for line in statement.source.splitlines() if not line.lstrip().startswith("--"))
    assert not re.search(r"(?<![\w.])(now|transaction_timestamp|statement_timestamp)\(\)", body)
    if path.name != "clock.sql":
        assert "current_timestamp" not in body
        assert "clock_timestamp" not in body


@pytest.mark.parametrize(("path", "statement"), NAMED)
def test_parameters_are_bound_and_not_pasted(path, statement):
    assert "::" not in statement.driver.replace("::regclass", ""), "`:p::type` stays unbound; write cast(:p as type)"
    assert not re.search(r"interval\s+':", statement.source)


# --- Python ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_file_holds_one_act(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 450


def all_modules():
    for module in pkgutil.walk_packages([str(PACKAGE)], "durable_core."):
        path = PACKAGE.joinpath(*module.name.split(".")[1:])
        path = path / "__init__.py" if module.ispkg else path.with_suffix(".py")
        if ".migrations" not in module.name and "__all__" in path.read_text(encoding="utf-8"):
            yield module.name


@pytest.mark.parametrize("name", ["durable_core", *all_modules()])
def test_what_a_module_exports_is_there_once(name):
    module = importlib.import_module(name)
    exported = module.__all__
    assert len(exported) == len(set(exported))
    for one in exported:
        assert hasattr(module, one), f"{name}.__all__ names {one}, which is not there"


def test_the_front_door_exports_what_it_imports_and_nothing_else():
    imported_here = {
        name
        for name, thing in vars(durable_core).items()
        if not name.startswith("_") and getattr(thing, "__module__", "").startswith("durable_core.")
    }
    assert imported_here <= set(durable_core.__all__)
    assert durable_core.__all__ == sorted(durable_core.__all__) or set(durable_core.__all__) >= imported_here


def test_the_newest_migration_is_the_newest_supported_revision():
    versions = sorted((PACKAGE / "database" / "migrations" / "versions").glob("r*.py"))
    assert [path.stem[1:5] for path in versions][-1] == migrate.newest()


def test_migrations_carry_their_text_and_import_no_table_of_states():
    for path in (PACKAGE / "database" / "migrations").rglob("*.py"):
        assert not [name for name in imported(path) if "states" in name or "guards" in name]


def test_sql_is_written_in_sql_files():
    """In Python nothing reads or writes our tables; a test kit and a migration say so where they do."""
    pattern = re.compile(r"\b(from|into|update|join)\s+durable\.", re.IGNORECASE)
    for path in MODULES:
        if path.name in ("guards.py", "databases.py"):
            continue
        assert not pattern.search(path.read_text(encoding="utf-8")), f"{path.relative_to(ROOT)} holds SQL"


def test_make_help_lists_every_command():
    import subprocess

    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[0].split()
    asked = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True)
    assert {line.split()[1] for line in shown.stdout.splitlines()} == set(commands)
