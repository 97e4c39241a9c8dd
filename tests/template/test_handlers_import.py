"""Every handler imports with the built layers alone, and brings in only its own part of the house.

The emulator lends functions its own packages, so a module missing from the layers would first be missed on AWS. Here
a bare interpreter gets the standard library, the function's folder, its layers and the template's variables.
"""

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from local.state import LAYER_CACHE, build_architecture
from tests.template.resolved import REGION, ROOT, code_folder, environment, functions, shipped

LAYERS = {
    "DependenciesLayer": "layers/dependencies",
    "SharedLayer": "layers/shared",
    "ProvidersLayer": "layers/dependencies",
}
SDKS = {"openai", "anthropic", "slack_sdk"}
HEAVY = {*SDKS, "httpx2"}
"""What takes long to import and only some jobs need."""
HEAVY_SERVICES = {"s3"}
"""AWS services of which the same holds for a client's making: it reads the service's description."""
UNCHECKED_HASH = 0b01
"""Flag word of byte code that is used without a look at its source (PEP 552)."""

PROBE = """
import importlib, importlib.machinery, json, sys
paths, module = json.loads(sys.argv[1])
opened = []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
sys.path[:0] = paths
compiled = []
compile_source = importlib.machinery.SourceFileLoader.source_to_code
def noted(self, data, path, **options):
    compiled.append(path)
    return compile_source(self, data, path, **options)
importlib.machinery.SourceFileLoader.source_to_code = noted
found = importlib.import_module(module)
print(json.dumps({
    "callable": callable(getattr(found, "handler", None)),
    "modules": list(sys.modules),
    "files": [m.__file__ for m in sys.modules.values() if getattr(m, "__file__", None)],
    "compiled": compiled,
    "services": [path.split("/botocore/data/")[1].partition("/")[0] for path in opened if "/botocore/data/" in path],
}))
"""


@pytest.fixture(scope="session")
def layers(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> list[Path]:
    """The python folders of all layers, built as `sam build` does it; once for all of pytest's processes."""
    own = tmp_path_factory.getbasetemp()
    base = own if worker_id == "master" else own.parent
    with (base / "layers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, folder in LAYERS.items():
            if not (base / name / "built").exists():
                _build(name, ROOT / folder, base / name)
                (base / name / "built").touch()
    return [base / name / "python" for name in LAYERS]


def _build(name: str, folder: Path, target: Path) -> None:
    variables = {
        "ARTIFACTS_DIR": str(target),
        "BACKBURNER_ARCHITECTURE": build_architecture(),
        "BACKBURNER_PYTHON": sys.executable,
        "BACKBURNER_CACHE": os.environ.get("BACKBURNER_CACHE", str(LAYER_CACHE)),
    }
    command = ["make", "--no-print-directory", "-C", str(folder), f"build-{name}"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def run_probe(
    module: str, paths: list[Path], home: Path, variables: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """Import a module in an interpreter without site-packages, user site, or anything of this environment."""
    arguments = json.dumps([[str(path) for path in paths], module])
    command = [sys.executable, "-I", "-S", "-B", "-c", PROBE, arguments]
    own = {"AWS_DEFAULT_REGION": REGION, "AWS_EC2_METADATA_DISABLED": "true", "HOME": str(home)}
    return subprocess.run(command, env=variables | own, capture_output=True, text=True, check=False, cwd=home)


def probe(module: str, paths: list[Path], home: Path, variables: dict[str, str] | None = None) -> dict[str, Any]:
    """What importing the module brought about."""
    done = run_probe(module, paths, home, variables or {})
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.fixture(scope="session", params=list(functions(shipped())))
def handler(request: pytest.FixtureRequest, layers: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For each function of the template: its folder's name, and what importing its handler brought about."""
    template = shipped()
    folder = code_folder(template, request.param)
    references = [layer["Ref"] for layer in functions(template)[request.param]["Layers"]]
    own = [path for name, path in zip(LAYERS, layers, strict=True) if any(ref.startswith(name) for ref in references)]
    assert len(own) == len(references)
    module, _, attribute = functions(template)[request.param]["Handler"].partition(".")
    assert attribute == "handler"
    variables = environment(template, request.param)
    return folder, probe(module, [folder, *own], tmp_path_factory.mktemp("home"), variables)


def test_every_handler_imports_with_nothing_but_the_layers(handler: Any, layers: list[Path]) -> None:
    """With the template's variables, the handler is built from the function's folder, the layers and Python itself."""
    folder, report = handler
    assert report["callable"]
    homes = (folder, *layers, Path(os.__file__).parent)
    assert [file for file in report["files"] if not any(Path(file).is_relative_to(home) for home in homes)] == []


def test_no_handler_brings_in_what_only_some_jobs_need(handler: Any) -> None:
    """No function imports an LLM SDK, an HTTP client or makes an S3 client before a job asks for it."""
    _, report = handler
    assert {name for name in report["modules"] if name in HEAVY} == set()
    assert {name for name in report["services"] if name in HEAVY_SERVICES} == set()


def test_a_handler_runs_on_the_byte_code_that_the_layers_ship(handler: Any) -> None:
    """Nothing from the layers is compiled at a cold start; only the function's own few lines are."""
    folder, report = handler
    assert set(report["compiled"]) <= {str(folder / "app.py")}  # which an earlier import may have compiled


@pytest.mark.parametrize(("provider", "other"), [("openai", "anthropic"), ("anthropic", "openai")])
def test_a_provider_brings_its_own_sdk_alone(provider: str, other: str, layers: list[Path], tmp_path: Path) -> None:
    """A job for one provider does not wait for the import of another's SDK; both are in the layers."""
    modules = set(probe(f"backburner.providers.{provider}", layers, tmp_path)["modules"])
    assert provider in modules
    assert other not in modules


def _header(module: Path) -> bytes:
    code = Path(importlib.util.cache_from_source(str(module)))
    return code.read_bytes()[:8] if code.exists() else b""


def test_every_module_of_the_layers_has_byte_code_that_is_used(layers: list[Path]) -> None:
    """Beside each module lies byte code of this Python's kind that is taken as it is, without a look at file times."""
    wanted = importlib.util.MAGIC_NUMBER + UNCHECKED_HASH.to_bytes(4, "little")
    modules = [module for layer in layers for module in layer.rglob("*.py")]
    assert len(modules) > 1000
    assert [module for module in modules if _header(module) != wanted] == []


def test_byte_code_names_the_files_where_they_lie_on_lambda(layers: list[Path]) -> None:
    """Tracebacks lead to /opt/python, where layers are unpacked, not to the machine that built them."""
    code = Path(importlib.util.cache_from_source(str(layers[1] / "backburner" / "bootstrap.py"))).read_bytes()
    assert b"/opt/python/backburner/bootstrap.py" in code
    assert str(layers[1]).encode() not in code


def test_a_module_missing_from_the_layers_is_found(layers: list[Path], tmp_path: Path) -> None:
    """The bare interpreter has nothing to lend: without the dependencies layer the import fails, and says of what."""
    done = run_probe("backburner.adapters.aws", [layers[1]], tmp_path, {})
    assert done.returncode != 0
    assert "No module named 'botocore'" in done.stderr


def test_the_probe_sees_what_is_heavy(layers: list[Path], tmp_path: Path) -> None:
    """A module that makes an S3 client at import, compiled on the spot, is seen as such."""
    (tmp_path / "eager.py").write_text(
        "import botocore.session\nimport httpx2\nbotocore.session.get_session().create_client('s3')\n"
    )
    report = probe("eager", [tmp_path, *layers], tmp_path)
    assert "httpx2" in report["modules"]
    assert "s3" in report["services"]
    assert report["compiled"] == [str(tmp_path / "eager.py")]
