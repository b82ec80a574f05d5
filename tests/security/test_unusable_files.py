"""Key, secret and certificate files that cannot be used: the error names key, path and reason."""

import contextlib
import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from baton.coordinator.server.server import Coordinator
from baton.gateway.metrics_auth import MetricsAuth
from baton.gateway.server import CellEndpoints, serve
from baton.runtime.config import parse
from baton.runtime.config_error import ConfigError
from baton.runtime.security.access import Access
from baton.runtime.security.dial import within_cluster
from baton.runtime.security.refusals import Refusals
from baton.runtime.security.tls import TlsFiles

NOBODY = 65534
KINDS = {
    "directory": "cannot be read: Is a directory",
    "link": "cannot be read: No such file or directory",
    "forbidden": "cannot be read: Permission denied",
    "garbage": "",
}


@contextlib.contextmanager
def unusable(path, kind):
    """Puts an unusable file at `path` while the context is entered."""
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(path.with_name("nowhere"))
    else:
        path.write_bytes(b"\xff\x00 garbage\n")
    if kind != "forbidden":
        yield str(path)
        return
    path.chmod(0)
    is_root = os.geteuid() == 0
    try:
        if is_root:
            # Root may read every file, so the test continues as another user.
            os.seteuid(NOBODY)
        yield str(path)
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture
def readable_pki(pki):
    """The same certificates and keys in a directory that every user may read."""
    with tempfile.TemporaryDirectory() as found:
        os.chmod(found, 0o755)
        for file in pki.directory.iterdir():
            shutil.copyfile(file, f"{found}/{file.name}")
            os.chmod(f"{found}/{file.name}", 0o644)
        yield replace(pki, directory=Path(found))


def set_up(security):
    """Creates all objects that read these files in any process."""
    Access(security, Refusals())
    MetricsAuth(security, Refusals())
    within_cluster(security, with_tls=security.dials_tls)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "key",
    [
        "api_keys_file",
        "cluster_token_file",
        "metrics_token_file",
        "jwt.key_file",
        "ca_file",
        "cert_file",
        "key_file",
    ],
)
def test_the_error_names_key_path_and_reason(readable_pki, key, kind):
    tls = readable_pki.server()
    with unusable(readable_pki.directory / "file", kind) as path:
        section = {**(tls if key in tls else {}), key: path}
        if key == "jwt.key_file":
            section = {"jwt": {"key_file": path, "issuer": "a", "audience": "b"}}
        security = parse({"security": section}, "test").security
        with pytest.raises(ConfigError) as caught:
            set_up(security)
    told = str(caught.value)
    assert f"security.{key}: {path}" in told
    assert KINDS[kind] in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("kind", ["directory", "garbage"])
async def test_a_gateway_names_its_ca_file_as_configured(pki, tmp_path, kind):
    with unusable(tmp_path / "file", kind) as path:
        config = parse({"security": {"ca_file": path}}, "test")
        with pytest.raises(ConfigError, match=f"^security.ca_file: {path} "):
            await serve(
                config.http,
                [CellEndpoints(["127.0.0.1:1"])],
                listener=None,
                ready=lambda: None,
                resume_timeout_s=1.0,
                security=config.security,
            )


async def test_a_cell_does_not_start_workers_that_could_not_read_their_files(tmp_path):
    config = parse({"engine": "simulated", "security": {"ca_file": str(tmp_path)}}, "test")
    with pytest.raises(ConfigError, match=f"^security.ca_file: {tmp_path} cannot be read"):
        async with Coordinator(config, launched=True):
            pass


def test_a_key_with_a_password_is_an_error_and_not_a_prompt(pki, tmp_path):
    from cryptography.hazmat.primitives import serialization as form

    key = form.load_pem_private_key((pki.directory / "server.key").read_bytes(), None)
    locked = tmp_path / "locked.key"
    how = form.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, how))
    with pytest.raises(ConfigError, match=f"security.key_file: {locked} are not PEM"):
        TlsFiles(pki.file("ca.pem"), pki.file("server.pem"), str(locked))
