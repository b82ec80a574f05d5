"""Ray's errors on one line: the reason stays, also when it is the end of a long traceback."""

from __future__ import annotations

import pytest

from baton.coordinator.launchers.ray_launch import wire

pytest.importorskip("ray")
cluster = pytest.importorskip("baton.coordinator.launchers.ray_launch.cluster")
calls = pytest.importorskip("baton.coordinator.launchers.ray_launch.calls")

# The errors of Ray 2.60 in this file are shortened.
NOT_INSTALLED = """\
The actor died because of an error raised in its creation task, \x1b[36mray::WorkerActor.__init__()\
\x1b[39m (pid=2995, ip=10.0.0.2, actor_id=1a26c588beef0f738983307601000000, \
repr=<actor.FunctionActorManager._create_fake_actor_class.<locals>.TemporaryActor object>)
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 449, in result
    return self.__get_result()
           ^^^^^^^^^^^^^^^^^^^
  File "/usr/lib/python3.11/concurrent/futures/_base.py", line 401, in __get_result
    raise self._exception
           ^^^^^^^^^^^^^^^^^^^^^
RuntimeError: The actor with name WorkerActor failed to import on the worker. This may be because \
needed library dependencies are not installed in the worker environment:

\x1b[36mray::WorkerActor.__init__()\x1b[39m (pid=2995, ip=10.0.0.2, repr=<TemporaryActor object>)
                  ^^^^^^^^^^^^^^^^^^
ModuleNotFoundError: No module named 'baton'"""
CALLS = (
    '  File "/usr/lib/ray/runtime_env/conda_utils.py", line 193, in get_conda_info_json\n    x\n'
)
NO_ENVIRONMENT = f"""\
Failed to set up runtime environment.
Could not create the actor because its associated runtime env failed to be created.
[Node 10.0.0.2] Traceback (most recent call last):
{10 * CALLS}FileNotFoundError: [Errno 2] No such file or directory: 'conda'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
{10 * CALLS}ValueError: Could not find Conda executable at conda.
"""
NO_SERVER = f"""\
Initialization failure from server:
Traceback (most recent call last):
{10 * CALLS}RuntimeError: Failed to create runtime_env:
pip: no matching distribution
"""


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            NOT_INSTALLED,
            "an error raised in its creation task: RuntimeError: The actor with name WorkerActor "
            "failed to import on the worker. This may be because needed library dependencies are "
            "not installed in the worker environment: "
            "ModuleNotFoundError: No module named 'baton'",
        ),
        (
            NO_ENVIRONMENT,
            "Failed to set up runtime environment: "
            "ValueError: Could not find Conda executable at conda.",
        ),
        (
            NO_SERVER,
            "Initialization failure from server: RuntimeError: Failed to create runtime_env: "
            "pip: no matching distribution",
        ),
        (
            "The actor died unexpectedly before finishing this task.\n\tclass_name: WorkerActor\n"
            "The actor is dead because it was killed by a `ray.kill` call.",
            "it was killed by a `ray.kill` call.",
        ),
        (
            "runtime_env['env_vars'] must be\nof type Dict",
            "runtime_env['env_vars'] must be of type Dict",
        ),
        ("", "RuntimeError"),
    ],
)
def test_the_reason_of_an_error_is_kept(text, line):
    assert calls.error_line(RuntimeError(text)) == line


@pytest.mark.parametrize(
    ("address", "where"),
    [("", "cannot start Ray here"), ("auto", "cannot connect to Ray at 'auto'")],
)
def test_an_invalid_runtime_env_is_not_called_a_wrong_address(monkeypatch, address, where):
    def refuse(**options):
        raise TypeError("runtime_env['env_vars'] must be of type Dict[str, str]")

    monkeypatch.setattr(cluster.ray, "init", refuse)
    opening = wire.Open(
        address=address,
        namespace="",
        runtime_env={"env_vars": {"A": 1}},
        directory="",
        coordinator="127.0.0.1:9",
        command=[],
        stop_timeout_s=1.0,
        connect_timeout_s=1.0,
        placement_timeout_s=1.0,
    )
    with pytest.raises(cluster.Refused) as refused:
        cluster.connect(opening)
    said = f"{where}: runtime_env['env_vars'] must be of type Dict[str, str]"
    assert str(refused.value) == said
