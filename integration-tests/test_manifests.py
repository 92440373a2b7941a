# SPDX-License-Identifier: Apache-2.0
"""Tests of the files for Slurm, KubeRay and SkyPilot in examples/clusters, with the syntax of what reads them."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner
from ray._private.label_utils import parse_node_labels_string
from ray.scripts.scripts import start
from ray.scripts.symmetric_run import curate_and_validate_ray_start_args

CLUSTERS = Path(__file__).parent.parent / "examples" / "clusters"


def fields(*required: str, **known: object) -> dict[str, object]:
    """Return the schema of an object that has the given fields and no others."""
    return {"type": "object", "properties": known, "required": list(required), "additionalProperties": False}


TEXT, NUMBER, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}


def each(item: object) -> dict[str, object]:
    return {"type": "array", "items": item, "minItems": 1}


# The fields that the files use, of the custom resource in KubeRay's repository at feeaf72 (2026-08-19), which has
# structural schemas: an unknown field would be dropped without an error.
CONTAINER = fields(
    "name",
    "image",
    name=TEXT,
    image=TEXT,
    command=each(TEXT),
    args=each(TEXT),
    env=each(fields("name", name=TEXT, value=TEXT)),
    resources=fields(limits=TEXTS, requests=TEXTS),
    volumeMounts=each(fields("name", "mountPath", name=TEXT, mountPath={"type": "string", "pattern": "^/"})),
)
POD = fields(
    "spec",
    spec=fields(
        "containers",
        containers=each(CONTAINER),
        volumes=each(fields("name", name=TEXT, emptyDir=fields(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT))),
        nodeSelector=TEXTS,
    ),
)
RAY_JOB = fields(
    "apiVersion",
    "kind",
    "metadata",
    "spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=fields("name", name={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}),
    spec=fields(
        "entrypoint",
        entrypoint=TEXT,
        shutdownAfterJobFinishes=FLAG,
        rayClusterSpec=fields(
            "headGroupSpec",
            rayVersion=TEXT,
            headGroupSpec=fields("template", rayStartParams=TEXTS, labels=TEXTS, template=POD),
            workerGroupSpecs=each(
                fields(
                    "groupName",
                    "maxReplicas",
                    "minReplicas",
                    "template",
                    groupName=TEXT,
                    replicas=NUMBER,
                    minReplicas=NUMBER,
                    maxReplicas=NUMBER,
                    labels=TEXTS,
                    rayStartParams=TEXTS,
                    template=POD,
                )
            ),
        ),
    ),
)
# The fields that the file uses, of SkyPilot's own schema (sky/utils/schemas.py) at 00052df.
SKY_TASK = fields(
    name=TEXT,
    workdir=TEXT,
    num_nodes={"type": "integer", "minimum": 1},
    resources=fields(
        accelerators={"type": "string", "pattern": r"^\w[\w-]*:\d+$"}, network_tier={"enum": ["best", "standard"]}
    ),
    envs=TEXTS,
    secrets={"type": "object", "additionalProperties": {"type": ["string", "null"]}},
    setup=TEXT,
    run=TEXT,
)


def read_yaml(name: str) -> dict:
    return yaml.safe_load((CLUSTERS / name).read_text())


@pytest.mark.parametrize(
    ("name", "schema"), [("kuberay.yaml", RAY_JOB), ("skypilot.yaml", SKY_TASK), ("why.yaml", CONTAINER)]
)
def test_schema(name, schema):
    """A manifest has the required fields and no field that its reader does not have."""
    manifest = read_yaml(name)
    jsonschema.validate(manifest, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**manifest, "spelled": "wrong"}, schema)


def test_kuberay_mounts_and_labels():
    """Every mount has its volume, all pods run one image of one Ray, and every worker group has its own domain."""
    cluster = read_yaml("kuberay.yaml")["spec"]["rayClusterSpec"]
    pods = [one["template"]["spec"] for one in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]]
    for pod in pods:
        mounts = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
    assert len({container["image"] for pod in pods for container in pod["containers"]}) == 1
    domains = [group["labels"]["ray.io/gpu-domain"] for group in cluster["workerGroupSpecs"]]
    assert len(set(domains)) == len(domains) == 2


def test_command_of_the_watch(tmp_path):
    """The shell of the container accepts its script, and `why` its options: without a cluster it ends with 3, not 2."""
    container = read_yaml("why.yaml")
    (script,) = container["args"]
    assert container["command"] == ["sh", "-c"]
    subprocess.run(["sh", "-n"], input=script, text=True, check=True)
    (line,) = [line.strip() for line in script.splitlines() if "fairlead_inspect" in line]
    python, *options = shlex.split(line.replace("/reports/why-$(date +%s)", str(tmp_path / "why")))
    env = {**os.environ, "RAY_ADDRESS": "127.0.0.1:1", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run([sys.executable, *options], env=env, capture_output=True, text=True, timeout=120)
    assert (python, done.returncode) == ("python", 3), done.stderr


def scripts() -> dict[str, str]:
    return {"slurm.sbatch": (CLUSTERS / "slurm.sbatch").read_text(), "skypilot.yaml": read_yaml("skypilot.yaml")["run"]}


@pytest.mark.parametrize("name", scripts())
def test_symmetric_run(name, tmp_path):
    """bash and Ray accept the script: its syntax, the options that are given to `ray start`, and the labels."""
    text = scripts()[name]
    subprocess.run(["bash", "-n"], input=text, check=True, text=True, timeout=60)
    line = re.search(r"ray (symmetric-run .*? --) ", text.replace("\\\n", " "), re.DOTALL)[1]
    for variable, value in {"HEAD": "n1", "head": "n1", "domain": "s1", "SLURM_NODEID": "0"}.items():
        line = line.replace(f"${variable}", value)
    _, *arguments, separator = shlex.split(re.sub(r"\$\w+", "2", line))
    assert separator == "--"
    given = curate_and_validate_ray_start_args(arguments)
    options = {option for parameter in start.params for option in parameter.opts}
    assert {one.partition("=")[0] for one in given if one.startswith("--")} <= options
    labels = parse_node_labels_string(given[given.index("--labels") + 1])
    assert int(labels["fairlead.io/topo-rank"]) in (0, 2)
    assert CliRunner().invoke(start, ["--no-such-option"]).exit_code == 2


def test_slurm_options():
    """The options of the batch script have a value each, and Slurm reads them before the first command."""
    lines = (CLUSTERS / "slurm.sbatch").read_text().splitlines()
    found = [line for line in lines if line.startswith("#SBATCH")]
    first = next(at for at, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in found)
    names = [re.fullmatch(r"#SBATCH --([a-z-]+)(=\S+)?", line)[1] for line in found]
    assert len(set(names)) == len(names)
    assert "ntasks-per-node" in names  # one Ray for each node


def test_slurm_domain():
    """The domain is made of the switches in Slurm's address of the node, and is a valid label."""
    text = (CLUSTERS / "slurm.sbatch").read_text()
    find = text[text.index("  domain=all") : text.index("  exec ray")]
    for address, domain in {
        "": "all",
        "s0.s[1-2].node7": "s0-s-1-2",
        "node7": "all",
        "core.leaf3.n1": "core-leaf3",
    }.items():
        command = ["bash", "-c", f"{find}\necho $domain"]
        done = subprocess.run(
            command,
            env={"SLURM_TOPOLOGY_ADDR": address, "PATH": "/usr/bin:/bin"},
            text=True,
            capture_output=True,
            timeout=60,
        )
        assert done.stdout.strip() == domain, done.stderr
        assert parse_node_labels_string(f"ray.io/gpu-domain={domain}") == {"ray.io/gpu-domain": domain}
