"""POST /jobs: takes a request in."""

from backburner.start import uncollected

with uncollected():  # built at import: Lambda gives the init phase a full CPU, the first request a share of one
    from backburner import bootstrap

    handler = bootstrap.ingest()
