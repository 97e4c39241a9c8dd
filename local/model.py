"""The local model: a server that speaks OpenAI's and Anthropic's protocols. Started only where it is
needed.
"""

import httpx2

from local.processes import Running, find, free_port, start
from local.state import ROOT, VENVS, State

NAME = "model"
PORTS = range(4580, 4590)
START_SECONDS_MAX = 60

# Names that the deployment knows it by, one for each protocol; the server itself answers to any name.
MODEL = "smollm2"
MODEL_BY_ANTHROPIC = "smollm2-anthropic"
# As model_server.py sets them: context of one slot, and the longest answer.
CONTEXT_TOKENS = 4096
ANSWER_TOKENS_MAX = 512


def catalogue(*, openai: bool, anthropic: bool) -> dict[str, dict[str, str | int]]:
    """Its entries for the deployment's catalogue, for the protocols that it answers."""
    size: dict[str, str | int] = {"context_tokens": CONTEXT_TOKENS, "output_tokens_max": ANSWER_TOKENS_MAX}
    entries = {}
    if openai:
        entries[MODEL] = {"provider": "openai", "api": "chat", **size}
    if anthropic:
        entries[MODEL_BY_ANTHROPIC] = {"provider": "anthropic", **size}
    return entries


def ensure(state: State) -> Running:
    """The running model server, started if need be."""
    running = find(state, NAME)
    if running is not None and is_healthy(running.port):
        return running
    port = free_port(PORTS if state.is_default else ())
    python = str(VENVS / "emulator" / "bin" / "python")
    return start(
        state,
        NAME,
        # -P: the script's own folder must not be searched for modules
        [python, "-P", str(ROOT / "local" / "model_server.py"), str(port)],
        env={"PATH": "/usr/bin:/bin", "HOME": str(state.scratch), "LANG": "C.UTF-8"},
        port=port,
        is_ready=lambda: is_healthy(port),
        seconds_max=START_SECONDS_MAX,
    )


def is_healthy(port: int) -> bool:
    """Whether the model is loaded."""
    try:
        answer = httpx2.get(f"http://127.0.0.1:{port}/health", timeout=2, trust_env=False)
    except httpx2.HTTPError:
        return False
    return answer.status_code == 200
