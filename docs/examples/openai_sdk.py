"""Ask with the OpenAI SDK, and print the answer when it is there.

    BACKBURNER_API_URL=… BACKBURNER_API_KEY=… python openai_sdk.py "Name a river." [MODEL]

Any model of the deployment's will do, Claude's as well. Needs the package openai.
"""

import os
import sys
import time
import uuid

from openai import OpenAI

client = OpenAI(base_url=os.environ["BACKBURNER_API_URL"] + "/v1", api_key=os.environ["BACKBURNER_API_KEY"])

# With a key, a retry of the request is no second job.
response = client.responses.create(
    model=sys.argv[2] if len(sys.argv) > 2 else "gpt-5.4-mini",
    input=sys.argv[1],
    background=True,
    extra_headers={"Idempotency-Key": str(uuid.uuid4())},
)
while response.status in ("queued", "in_progress"):
    time.sleep(1)
    response = client.responses.retrieve(response.id, extra_query={"wait": 20})
if response.status != "completed":
    sys.exit(f"{response.status}: {response.error or response.incomplete_details}")
print(response.output_text)
