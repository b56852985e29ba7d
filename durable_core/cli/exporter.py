"""`durable exporter`: the page that Prometheus reads."""

from __future__ import annotations

import signal
import threading

import click

from durable_core.cli import exits
from durable_core.cli.exits import CommandError
from durable_core.cli.output import Output, note
from durable_core.cli.where import Where, options
from durable_core.database.environment import EXPORTER_HOST_VARIABLE, EXPORTER_PORT_VARIABLE

DEFAULT_PORT = 9830


class MetricsNotInstalled(CommandError):
    """The library that writes the page is not installed."""

    reason = "METRICS_NOT_INSTALLED"


class AddressNotUsable(CommandError):
    """Nothing can listen at this address."""

    reason = "ADDRESS_NOT_USABLE"


@click.command()
@options
@click.option(
    "--host", envvar=EXPORTER_HOST_VARIABLE, show_envvar=True, default="127.0.0.1", show_default=True,
    metavar="ADDRESS",
    help="Where to listen. The page has no password: keep it on loopback, or in a network of your own.",
)  # fmt: skip
@click.option(
    "--port", envvar=[EXPORTER_PORT_VARIABLE, "PORT"], show_envvar=True, type=click.IntRange(0, 65535),
    default=DEFAULT_PORT, show_default=True, metavar="PORT", help="The port; 0 for any that is free.",
)  # fmt: skip
@click.option(
    "--interval", type=click.FloatRange(min=1), default=15.0, show_default=True, metavar="SECONDS",
    help="Between two looks at the database, however often the page is read.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON value on stdout, once it listens.")
@click.pass_obj
def exporter(where: Where, host: str, port: int, interval: float, as_json: bool) -> int:
    """
    Serve metrics of the rows at /metrics, for Prometheus, and /livez, /readyz and /healthz.

    Runs until it is told to end. One is enough for a database; a second one does no harm. With -A it knows the app's
    own intervals of the sweeps.
    """
    try:
        from durable_core.exporter.observe import Observer
        from durable_core.exporter.serve import Server
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "prometheus_client":
            raise
        raise MetricsNotInstalled(
            "the exporter needs prometheus-client, which is not installed: pip install 'durable-core[metrics]'."
        ) from error
    with where.database() as (database, durable):
        sweeps = None
        if durable is not None:
            sweeps = {sweep.name: sweep.interval for sweep in durable.settings.sweeps()}
        observer = Observer(database, interval=interval, sweeps=sweeps)
        try:
            server = Server((host, port), observer)
        except OSError as error:
            raise AddressNotUsable(
                f"cannot listen at {host}:{port} ({error.strerror}); name another --port."
            ) from error
        serving = threading.Thread(target=server.serve_forever, daemon=True)
        ends = threading.Event()
        before = {number: signal.signal(number, lambda *_: ends.set()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            observer.start()
            serving.start()
            url = f"http://{host}:{server.server_address[1]}/metrics"
            if as_json:
                Output(as_json).answer({"url": url})
            else:
                note(f"serving {url}")
            ends.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            server.shutdown()
            server.server_close()
            observer.stop()
    return exits.OK
