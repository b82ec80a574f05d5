"""Manifests are valid and match each other, the configuration and the command line."""

from __future__ import annotations

import itertools

import jsonschema
import kubernetes_validate
import pytest
import yaml

from baton.cli.config import check
from baton.runtime.names import FIRST_REVISION
from tests.deploy.custom_resources import BY_KIND
from tests.deploy.deploy_files import (
    DEPLOY,
    ROOT,
    STOP_MARGIN_S,
    config,
    documents,
    drain_s,
    listens,
    options,
    quantity,
)

KUBERNETES = DEPLOY / "kubernetes"
# Oldest supported version of Kubernetes, and the newest version with an installed schema.
VERSIONS = ("1.30", "1.37")
OVERLAYS = {
    "gpu": ("base", "gpu"),
    "cpu": ("base", "cpu"),
    "kuberay": ("kuberay",),
}
FILES = sorted(
    path
    for path in KUBERNETES.rglob("*.yaml")
    if path.name not in ("kustomization.yaml", "baton.yaml")
)
RESOURCES = [
    pytest.param(
        resource, id=f"{path.parent.name}-{resource['kind']}-{resource['metadata']['name']}"
    )
    for path in FILES
    for resource in documents(path)
]
WORKLOADS = ("StatefulSet", "Deployment")


def overlay(name: str) -> list[dict]:
    return [
        resource
        for directory in OVERLAYS[name]
        for path in sorted((KUBERNETES / directory).glob("*.yaml"))
        if path in FILES
        for resource in documents(path)
    ]


def pods(name: str):
    """Yields workload, pod spec and container of each workload that runs Baton."""
    for one in overlay(name):
        if one["kind"] in WORKLOADS:
            spec = one["spec"]["template"]["spec"]
            (container,) = spec["containers"]
            yield one, spec, container


PODS = [
    pytest.param(name, spec, container, id=f"{name}-{workload['metadata']['name']}")
    for name in OVERLAYS
    for workload, spec, container in pods(name)
]


def selected(selector: dict, labels: dict) -> bool:
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In"
        if labels.get(one["key"]) not in one["values"]:
            return False
    return selector.get("matchLabels", {}).items() <= labels.items()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("resource", RESOURCES)
def test_a_resource_matches_its_schema(resource, version):
    schema = BY_KIND.get(resource["kind"])
    if schema is None:
        kubernetes_validate.validate(resource, version, strict=True)
        return
    jsonschema.validate(resource, schema)
    if resource["kind"] == "RayCluster":
        spec = resource["spec"]
        for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
            template = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
            kubernetes_validate.validate(template, version, strict=True)


def test_the_schemas_reject_unknown_fields():
    (stateful,) = (
        one
        for one in documents(KUBERNETES / "base" / "coordinator.yaml")
        if one["kind"] == "StatefulSet"
    )
    stateful["spec"]["template"]["spec"]["terminationGraceSeconds"] = 60
    with pytest.raises(kubernetes_validate.ValidationError, match="terminationGraceSeconds"):
        kubernetes_validate.validate(stateful, VERSIONS[0], strict=True)
    (ray,) = documents(KUBERNETES / "kuberay" / "raycluster.yaml")
    ray["spec"]["workerGroupSpec"] = []
    with pytest.raises(jsonschema.ValidationError, match="workerGroupSpec"):
        jsonschema.validate(ray, BY_KIND["RayCluster"])


@pytest.mark.parametrize("directory", [*OVERLAYS, "base", "monitoring"])
def test_kustomizations_name_every_file(directory):
    path = KUBERNETES / directory / "kustomization.yaml"
    found = yaml.safe_load(path.read_text())
    here = {one.name for one in path.parent.glob("*.yaml")} - {"kustomization.yaml", "baton.yaml"}
    listed = {name for name in found["resources"] if name.endswith(".yaml")}
    assert listed == here
    for name in set(found["resources"]) - listed:
        assert (path.parent / name / "kustomization.yaml").exists()
    for generator in found.get("configMapGenerator", []):
        assert generator["name"] == "baton-config"
        assert all((path.parent / file).exists() for file in generator["files"])


def test_grafanas_configmap_has_every_dashboard():
    found = yaml.safe_load((DEPLOY / "grafana" / "kustomization.yaml").read_text())
    (generator,) = found["configMapGenerator"]
    there = (DEPLOY / "grafana" / "dashboards").glob("*.json")
    assert set(generator["files"]) == {f"dashboards/{path.name}" for path in there}


@pytest.mark.parametrize("name", OVERLAYS)
def test_the_configuration_is_valid(name, capsys):
    file = KUBERNETES / name / "baton.yaml"
    check(str(file))
    assert capsys.readouterr().out == f"{file}: ok\n"


@pytest.mark.parametrize(("name", "spec", "container"), PODS)
def test_a_pod_matches_its_command_and_configuration(name, spec, container):
    effective = config(KUBERNETES / name / "baton.yaml")
    command, given = options(container["args"])
    assert given["config"] == "/etc/baton/baton.yaml"
    mounts = {one["mountPath"]: one for one in container["volumeMounts"]}
    assert mounts[given["config"]]["subPath"] == "baton.yaml"
    assert {one["name"] for one in container["volumeMounts"]} == {
        one["name"] for one in spec["volumes"]
    }
    assert {one["containerPort"] for one in container["ports"]} == listens(command, effective)
    assert spec["terminationGracePeriodSeconds"] >= drain_s(command, effective) + STOP_MARGIN_S
    if "coordinator" in given:
        service, _, port = given["coordinator"].partition(":")
        assert int(port) in service_ports(name, service)


def service_ports(name: str, service: str) -> set[int]:
    (found,) = (
        one
        for one in overlay(name)
        if one["kind"] == "Service" and one["metadata"]["name"] == service
    )
    return {one["port"] for one in found["spec"]["ports"]}


@pytest.mark.parametrize(("name", "spec", "container"), PODS)
def test_a_pod_is_confined(name, spec, container):
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    context = container["securityContext"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["capabilities"] == {"drop": ["ALL"]}
    assert not container["image"].endswith(":latest")
    assert container["resources"]["limits"]["memory"]
    assert container["resources"]["requests"]["cpu"]


@pytest.mark.parametrize(("name", "spec", "container"), PODS)
def test_probes_use_open_ports_and_wait_long_enough(name, spec, container):
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        for how in ("grpc", "httpGet", "tcpSocket"):
            port = probe.get(how, {}).get("port")
            assert port is None or port in named or port in named.values()
    assert "readinessProbe" in container
    assert "livenessProbe" in container
    if container["args"][0] == "worker":
        probe = container["startupProbe"]
        effective = config(KUBERNETES / name / "baton.yaml")
        stop_timeout_s = probe["periodSeconds"] * probe["failureThreshold"]
        assert stop_timeout_s > effective.worker.start_timeout_s


@pytest.mark.parametrize("name", ["gpu", "cpu"])
def test_workers_have_room_for_their_staging(name):
    effective = config(KUBERNETES / name / "baton.yaml")
    staging = effective.kv_transfer.send_bytes + effective.kv_transfer.receive_bytes
    seen = 0
    for _, spec, container in pods(name):
        if container["args"][0] != "worker":
            continue
        seen += 1
        (shm,) = (one["emptyDir"] for one in spec["volumes"] if one["name"] == "shm")
        assert shm["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
        limits = container["resources"]["limits"]
        assert staging < quantity(shm["sizeLimit"]) < quantity(limits["memory"])
        gpus = int(limits.get("nvidia.com/gpu", 0))
        wanted = effective.tensor_parallel_size(effective.prefill) if name == "gpu" else 0
        assert gpus == wanted == int(container["resources"]["requests"].get("nvidia.com/gpu", 0))
    assert seen == 2


@pytest.mark.parametrize("name", OVERLAYS)
def test_selectors_find_pods(name):
    labels = [one["spec"]["template"]["metadata"]["labels"] for one, _, _ in pods(name)]
    ports = [
        (one["spec"]["template"]["metadata"]["labels"], {p["name"]: p for p in container["ports"]})
        for one, _, container in pods(name)
    ]
    for resource in overlay(name):
        spec = resource.get("spec", {})
        match resource["kind"]:
            case "Service":
                found = [known for own, known in ports if spec["selector"].items() <= own.items()]
                assert found
                for known, port in itertools.product(found, spec["ports"]):
                    assert port["targetPort"] in known
            case "PodDisruptionBudget":
                assert sum(selected(spec["selector"], own) for own in labels) == 1
            case "NetworkPolicy":
                assert any(selected(spec["podSelector"], own) for own in labels)
            case "StatefulSet" | "Deployment":
                template = spec["template"]["metadata"]["labels"]
                assert selected(spec["selector"], template)


# Scraped jobs of a pod, by its command. `up` runs a coordinator and a gateway; Ray's pods run the
# workers.
JOBS = {
    "coordinator": ["baton-coordinator"],
    "gateway": ["baton-gateway"],
    "worker": ["baton-workers"],
    "up": ["baton-coordinator", "baton-gateway"],
}


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_pod_is_scraped(name):
    monitors = documents(KUBERNETES / "monitoring" / "podmonitors.yaml")
    for workload, _, container in pods(name):
        labels = workload["spec"]["template"]["metadata"]["labels"]
        ports = {one["name"] for one in container["ports"]}
        found = [
            relabeling["replacement"]
            for monitor in monitors
            if selected(monitor["spec"]["selector"], labels)
            for endpoint in monitor["spec"]["podMetricsEndpoints"]
            if endpoint["port"] in ports
            for relabeling in endpoint["relabelings"]
            if relabeling["targetLabel"] == "job"
        ]
        assert found == JOBS[container["args"][0]]
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yaml").read_text())
    assert {one for jobs in JOBS.values() for one in jobs} == {
        one["job_name"] for one in scraped["scrape_configs"]
    }


def test_the_ray_cluster_scales_with_the_pools():
    """Ray adds nodes only for workers that Baton starts, so both must scale, in the same limits."""
    (ray,) = documents(KUBERNETES / "kuberay" / "raycluster.yaml")
    effective = config(KUBERNETES / "kuberay" / "baton.yaml")
    assert ray["spec"]["enableInTreeAutoscaling"] is True
    assert effective.scaling.autoscale is True
    limits = (effective.scaling.prefill, effective.scaling.decode)
    (group,) = ray["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    gpus_per_node = int(container["resources"]["limits"]["nvidia.com/gpu"])
    for nodes, workers in (
        (group["minReplicas"], sum(one.min_workers for one in limits)),
        (group["maxReplicas"], sum(one.max_workers for one in limits)),
    ):
        assert nodes * gpus_per_node == workers


def test_workers_on_ray_wait_for_a_new_node():
    """A usual start of a worker includes the start of its node. Each worker's limit comes later."""
    effective = config(KUBERNETES / "kuberay" / "baton.yaml")
    scaling = effective.scaling
    assert scaling.cold_start_s < effective.ray.placement_timeout_s < scaling.start_timeout_s


# Keys that only the autoscaler of `baton up` uses. (Limits also bound sizes set by hand there.)
AUTOSCALING = {"prefill", "decode", "max_gpus", "cold_start_s", "down_window_s", "idle_s", "flip"}


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=str(file.relative_to(DEPLOY)))
        for file in [*DEPLOY.glob("examples/*.yaml"), *KUBERNETES.rglob("baton.yaml")]
    ],
)
def test_a_configuration_for_autoscaling_turns_it_on(file):
    scaling = yaml.safe_load(file.read_text()).get("scaling", {})
    assert scaling.get("autoscale") is True or not AUTOSCALING & scaling.keys()


def test_the_ray_version_equals_the_ray_extra():
    (ray,) = documents(KUBERNETES / "kuberay" / "raycluster.yaml")
    assert f'ray = ["ray=={ray["spec"]["rayVersion"]}"]' in (ROOT / "pyproject.toml").read_text()


def test_every_container_of_the_ray_cluster_fits_the_restricted_policy():
    """The namespace refuses a pod with a container that does not, also one that KubeRay adds."""
    (ray,) = documents(KUBERNETES / "kuberay" / "raycluster.yaml")
    groups = [ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]]
    pods = [group["template"]["spec"] for group in groups]
    containers = [one for pod in pods for one in pod["containers"]]
    for one in [ray["spec"]["autoscalerOptions"], *containers]:
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_pods_of_one_deployment_may_differ_in_their_revision(name):
    """Old and new pods run side by side, so operators must be able to tell them apart."""
    values = yaml.safe_load((KUBERNETES / name / "baton.yaml").read_text())
    # The default: an upgrade of the manifests alone changes no revision.
    assert values["worker"]["revision"] == FIRST_REVISION
