"""JSON schemas of the custom resources in deploy/, restricted to the fields that deploy/ uses.

A field that is missing here fails validation; add it when deploy/ needs it. The tests check pod
templates inside these resources against Kubernetes' own schema.
"""

from __future__ import annotations

STRING = {"type": "string"}
STRINGS = {"type": "array", "items": STRING}
MAP = {"type": "object", "additionalProperties": STRING}
INTEGER = {"type": "integer", "minimum": 0}
# Duration format of Prometheus and of the Prometheus operator.
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"}


def _object(required: list[str], **properties: object) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _array(items: object) -> dict:
    return {"type": "array", "items": items, "minItems": 1}


def _resource(api: str, kind: str, spec: dict) -> dict:
    return _object(
        ["apiVersion", "kind", "metadata", "spec"],
        apiVersion={"const": api},
        kind={"const": kind},
        metadata=_object(["name"], name=STRING, namespace=STRING, labels=MAP),
        spec=spec,
    )


_EXPRESSION = _object(
    ["key", "operator"],
    key=STRING,
    operator={"enum": ["In", "NotIn", "Exists", "DoesNotExist"]},
    values=STRINGS,
)
_RELABELING = _object(
    [],
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
    targetLabel=STRING,
    replacement=STRING,
    sourceLabels=STRINGS,
    separator=STRING,
    regex=STRING,
)
# github.com/prometheus-operator/prometheus-operator, Documentation/api-reference/api.md.
POD_MONITOR = _resource(
    "monitoring.coreos.com/v1",
    "PodMonitor",
    _object(
        ["selector", "podMetricsEndpoints"],
        namespaceSelector=_object([], any={"type": "boolean"}, matchNames=STRINGS),
        selector=_object([], matchLabels=MAP, matchExpressions=_array(_EXPRESSION)),
        podMetricsEndpoints=_array(
            _object(
                ["port"],
                port=STRING,
                path=STRING,
                interval=DURATION,
                scrapeTimeout=DURATION,
                scheme={"enum": ["http", "https"]},
                relabelings=_array(_RELABELING),
            )
        ),
    ),
)
PROMETHEUS_RULE = _resource(
    "monitoring.coreos.com/v1",
    "PrometheusRule",
    _object(
        ["groups"],
        groups=_array(
            _object(
                ["name", "rules"],
                name=STRING,
                interval=DURATION,
                rules=_array(
                    {
                        "type": "object",
                        "properties": {
                            "alert": STRING,
                            "record": STRING,
                            "expr": STRING,
                            "for": DURATION,
                            "labels": MAP,
                            "annotations": MAP,
                        },
                        "required": ["expr"],
                        "oneOf": [{"required": ["alert"]}, {"required": ["record"]}],
                        "additionalProperties": False,
                    }
                ),
            )
        ),
    ),
)
# github.com/ray-project/kuberay, docs/reference/api.md, ray.io/v1.
_QUANTITY = {"type": ["string", "integer"]}
_QUANTITIES = {"type": "object", "additionalProperties": _QUANTITY}
RAY_CLUSTER = _resource(
    "ray.io/v1",
    "RayCluster",
    _object(
        ["headGroupSpec"],
        rayVersion=STRING,
        enableInTreeAutoscaling={"type": "boolean"},
        autoscalerOptions=_object(
            [],
            idleTimeoutSeconds=INTEGER,
            upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
            resources=_object([], requests=_QUANTITIES, limits=_QUANTITIES),
            securityContext=_object(
                [],
                allowPrivilegeEscalation={"type": "boolean"},
                capabilities=_object([], add=STRINGS, drop=STRINGS),
            ),
        ),
        headGroupSpec=_object(
            ["template"],
            serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            rayStartParams=MAP,
            template={"type": "object"},
        ),
        workerGroupSpecs=_array(
            _object(
                ["groupName", "template", "maxReplicas", "minReplicas"],
                groupName=STRING,
                replicas=INTEGER,
                minReplicas=INTEGER,
                maxReplicas=INTEGER,
                rayStartParams=MAP,
                template={"type": "object"},
            )
        ),
    ),
)
BY_KIND = {
    "PodMonitor": POD_MONITOR,
    "PrometheusRule": PROMETHEUS_RULE,
    "RayCluster": RAY_CLUSTER,
}
