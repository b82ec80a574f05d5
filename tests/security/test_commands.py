"""Commands that make certificates and keys, and commands that use them."""

import os
import ssl
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography import x509

from baton.cli import keys
from baton.runtime.config_error import ConfigError
from baton.runtime.security import api_keys

TIMEOUT_S = 120


@pytest.fixture
def baton(tmp_path):
    def run(*arguments, **env):
        base = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
        return subprocess.run(
            [sys.executable, "-m", "baton.cli", *arguments],
            capture_output=True,
            stdin=subprocess.DEVNULL,
            text=True,
            timeout=TIMEOUT_S,
            cwd=tmp_path,
            env=base | {"HOME": str(tmp_path)} | env,
        )

    return run


def serial(file: Path) -> int:
    return x509.load_pem_x509_certificate(file.read_bytes()).serial_number


def test_commands_accept_the_certificates_and_keys_that_baton_made(
    baton, tmp_path, coordinator_process
):
    made = baton("certs", "certs", "--host", "10.0.0.5", "--days", "3")
    assert made.returncode == 0, made.stderr
    certs = tmp_path / "certs"
    assert set(made.stdout.split()) == {f"certs/{file.name}" for file in certs.iterdir()}
    for file in certs.glob("*.key"):
        assert file.stat().st_mode & 0o077 == 0
    server = x509.load_pem_x509_certificate((certs / "server.pem").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert "baton" in names.get_values_for_type(x509.DNSName)
    assert "10.0.0.5" in map(str, names.get_values_for_type(x509.IPAddress))
    ssl.create_default_context(cafile=certs / "ca.pem").load_cert_chain(
        certs / "server.pem", certs / "server.key"
    )

    user = baton("keys", "add", "keys.yaml", "--name", "search", "--tenant", "search")
    admin = baton("keys", "add", "keys.yaml", "--name", "ops", "--admin", "--days", "1")
    entries = {key.name: key for key in api_keys.read(str(tmp_path / "keys.yaml")).values()}
    assert entries["search"].matches(user.stdout.strip())
    assert entries["ops"].admin
    assert (tmp_path / "keys.yaml").stat().st_mode & 0o077 == 0

    address = coordinator_process(
        {
            "ca_file": "certs/ca.pem",
            "cert_file": "certs/server.pem",
            "key_file": "certs/server.key",
            "api_keys_file": "keys.yaml",
        }
    )
    (tmp_path / "key").write_text(admin.stdout)
    good = baton(
        *("--tls-ca", "certs/ca.pem", "--api-key-file", "key", "pools", "--address", address)
    )
    assert good.returncode == 0, good.stderr
    by_environment = {"BATON_TLS_CA": "certs/ca.pem", "BATON_API_KEY": user.stdout.strip()}
    refused = baton("pools", "--address", address, **by_environment)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "no admin rights" in refused.stderr
    plain = baton("pools", "--address", address)
    assert (plain.returncode, plain.stdout) == (3, "")
    assert "Socket closed; it may want TLS" in plain.stderr
    assert baton("certs", "others").returncode == 0
    distrusted = baton("--tls-ca", "others/ca.pem", "pools", "--address", address)
    assert (distrusted.returncode, distrusted.stdout) == (3, "")
    assert distrusted.stderr.endswith(": unable to get local issuer certificate\n")
    text = refused.stderr + good.stderr + good.stdout
    assert user.stdout.strip() not in text
    assert admin.stdout.strip() not in text


@pytest.fixture
def coordinator_process(baton, tmp_path, model):
    started = []

    def start(security):
        import yaml

        config = {"model": model, "engine": "simulated", "security": security}
        (tmp_path / "baton.yaml").write_text(yaml.safe_dump(config))
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "baton.cli", "coordinator"),
                *("--config", "baton.yaml", "--listen", "127.0.0.1:0"),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=tmp_path,
        )
        started.append(process)
        line = process.stdout.readline()
        assert line.startswith("ready grpc="), line
        return line.removeprefix("ready grpc=").strip()

    yield start
    for process in started:
        process.terminate()
        process.wait(TIMEOUT_S)
        process.stdout.close()


def test_certificates_that_do_not_fit_on_the_disk_leave_no_files(tmp_path):
    done = subprocess.run(
        ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh"]
        + [sys.executable, "-m", "baton.cli", "certs", "certs"],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr == "baton: certs: cannot be written: File too large\n"
    assert list((tmp_path / "certs").iterdir()) == []


def test_certs_renews_and_keeps_its_ca(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from baton.cli.main import app

    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    assert runner.invoke(app, ["certs", "c"]).exit_code == 0
    before = {file.name: file.read_bytes() for file in Path("c").iterdir()}
    assert runner.invoke(app, ["certs", "c"]).exit_code == 0
    changed = {file.name for file in Path("c").iterdir() if file.read_bytes() != before[file.name]}
    assert changed == set(before) - {"ca.pem", "ca.key"}
    assert serial(Path("c/server.pem"))


@pytest.mark.parametrize("lone", ["ca.pem", "ca.key", "server.key"])
def test_certs_overwrites_nothing_without_its_ca(baton, tmp_path, lone):
    (tmp_path / lone).write_text("somebody's own")
    made = baton("certs", ".")
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr.startswith(f"baton: {lone} would be overwritten, and there is no ca.pem")
    assert [file.name for file in tmp_path.iterdir()] == [lone]
    assert (tmp_path / lone).read_text() == "somebody's own"


def test_certs_does_not_sign_with_another_key(baton, tmp_path):
    for directory in ("one", "other"):
        assert baton("certs", directory).returncode == 0
    (tmp_path / "other" / "ca.key").rename(tmp_path / "one" / "ca.key")
    made = baton("certs", "one")
    assert (made.returncode, made.stdout) == (2, "")
    assert made.stderr == "baton: one/ca.key: not the key of one/ca.pem\n"


@pytest.mark.parametrize("host", ["", "münchen.example"])
def test_a_host_that_is_not_valid_in_a_certificate(baton, tmp_path, host):
    made = baton("certs", "certs", "--host", host)
    assert made.returncode == 2
    assert made.stderr.startswith(f"baton: {host!r} is neither an IP address nor ")
    assert not (tmp_path / "certs").exists()


def test_keys_are_listed_without_secrets_and_removed(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from baton.cli.main import app

    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    key = runner.invoke(
        app, ["keys", "add", "k", "--name", "one", "--tenant", "a", "--lane", "batch"]
    ).output.strip()
    assert api_keys.id_of(key)
    twice = runner.invoke(app, ["keys", "add", "k", "--name", "one", "--tenant", "a"])
    assert "k already has a key" in str(twice.exception)
    nothing = runner.invoke(app, ["keys", "add", "k", "--name", "none"])
    assert nothing.exit_code == 2
    assert "a key needs --tenant" in nothing.output
    odd = runner.invoke(app, ["keys", "add", "k", "--name", "a b", "--admin"])
    assert str(odd.exception) == "name: must be 1 to 64 characters of [A-Za-z0-9._:-]"
    Path("list").write_text("- a\n")
    assert str(runner.invoke(app, ["keys", "list", "list"]).exception) == (
        "list: must be a mapping of keys"
    )
    listed = runner.invoke(app, ["keys", "list", "k"]).output
    assert "one" in listed
    assert key[-43:] not in listed
    assert runner.invoke(app, ["keys", "remove", "k", "--name", "one"]).exit_code == 0
    assert "no keys" in runner.invoke(app, ["keys", "list", "k"]).output


def test_a_changed_key_file_keeps_its_owner_and_mode(tmp_path):
    file = tmp_path / "keys.yaml"
    _, entry = api_keys.make("one", tenant="a")
    api_keys.write(str(file), [entry])
    assert file.stat().st_mode & 0o777 == 0o600
    file.chmod(0o640)
    owner = 12345 if os.geteuid() == 0 else os.geteuid()
    os.chown(file, owner, -1)
    api_keys.write(str(file), [])
    assert file.stat().st_mode & 0o777 == 0o640
    assert file.stat().st_uid == owner
    assert api_keys.read(str(file)) == {}


def test_a_key_file_behind_a_link_is_replaced_at_its_target(tmp_path):
    (link := tmp_path / "keys.yaml").symlink_to("kept.yaml")
    key, entry = api_keys.make("one", tenant="a")
    api_keys.write(str(link), [entry])
    assert link.is_symlink()
    assert api_keys.read(str(tmp_path / "kept.yaml"))[entry.id].matches(key)


def test_a_key_file_that_does_not_fit_on_the_disk_leaves_no_file(tmp_path):
    program = (
        "import resource; from baton.runtime.security import api_keys; "
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)); "
        "api_keys.write('keys.yaml', [])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, timeout=TIMEOUT_S
    )
    assert b"File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_keys_do_not_replace_a_special_file(tmp_path):
    """The file could be /dev/null, which root may replace."""
    os.mkfifo(pipe := tmp_path / "keys.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        api_keys.write(str(pipe), [])
    assert pipe.is_fifo()
    assert list(tmp_path.iterdir()) == [pipe]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tls-cert", "a"], "--tls-cert and --tls-key must be set together"),
        (["--tls-cert", "a", "--tls-key", "b"], "need --tls-ca"),
        (["--tls-ca", "nowhere.pem"], "--tls-ca: nowhere.pem cannot be read"),
        (["--tls-ca", "."], "--tls-ca: . cannot be read: Is a directory"),
        (["--tls-ca", "/dev/null"], "--tls-ca: /dev/null is not a certificate in PEM"),
        (["--api-key-file", "."], "--api-key-file: . cannot be read: Is a directory"),
        (["--api-key-file", "/dev/null"], "--api-key-file: /dev/null must hold one word"),
        (["--api-key-file", "nowhere"], "--api-key-file: nowhere cannot be read"),
    ],
)
def test_options_that_cannot_work_are_named(tmp_path, monkeypatch, options, message):
    from typer.testing import CliRunner

    from baton.cli import connection
    from baton.cli.main import app

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, [*options, "pools", "--address", "127.0.0.1:1"])
    assert message in str(result.exception)
    assert connection.current() == connection.Connection(), "options outlived their command"


def test_a_key_is_given_once_and_an_option_overrides_a_variable(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from baton.cli.main import app

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BATON_API_KEY", "one")
    ask = ["pools", "--address", "127.0.0.1:1"]
    by_option = CliRunner().invoke(app, ["--api-key-file", "nowhere", *ask])
    assert "--api-key-file: nowhere cannot be read" in str(by_option.exception)
    monkeypatch.setenv("BATON_API_KEY_FILE", "other")
    both = CliRunner().invoke(app, ask)
    assert "BATON_API_KEY and BATON_API_KEY_FILE are both set" in str(both.exception)


@pytest.mark.parametrize("key", ["g\u00fcnther", "two\nlines", "\udcff", "two words"])
def test_a_key_that_cannot_be_sent_is_a_usage_error(monkeypatch, key):
    from typer.testing import CliRunner

    from baton.cli.exit_codes import USAGE, exit_code
    from baton.cli.main import app

    monkeypatch.setenv("BATON_API_KEY", key)
    for ask in (["pools"], ["generate", "hi"]):
        error = CliRunner().invoke(app, [*ask, "--address", "127.0.0.1:1"]).exception
        assert exit_code(error) == USAGE
        assert str(error) == "BATON_API_KEY: must be one word of printable ASCII"
        assert key not in str(error)


def test_keys_that_are_added_concurrently_are_all_kept(tmp_path, monkeypatch):
    path, read = str(tmp_path / "keys.yaml"), api_keys.read

    def slowly(path):
        found = read(path)
        time.sleep(0.02)
        return found

    monkeypatch.setattr(api_keys, "read", slowly)
    names = [f"key-{number}" for number in range(6)]
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(lambda name: keys.add(path, name=name, tenant="a"), names))
        assert {entry.name for entry in read(path).values()} == set(names)
        list(pool.map(lambda name: keys.remove(path, name=name), names[:3]))
    assert {entry.name for entry in read(path).values()} == set(names[3:])
    assert [file.name for file in tmp_path.iterdir()] == ["keys.yaml"]


def test_the_wait_for_the_key_files_lock_is_limited(tmp_path, monkeypatch):
    path = str(tmp_path / "keys.yaml")
    monkeypatch.setattr(api_keys, "_LOCK_TIMEOUT_S", 0.05)
    with api_keys.locked(path), pytest.raises(ConfigError, match="another process"):
        keys.add(path, name="one", tenant="a")
    keys.add(path, name="one", tenant="a")
