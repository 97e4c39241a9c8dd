// BullMQ: a worker, or with the argument `submit` the submitter; see common.py for what both are told.
//
// https://docs.bullmq.io/guide/retrying-failing-jobs: attempts with exponential backoff.
// https://docs.bullmq.io/guide/rate-limiting: a limiter for all workers together; on a 429, "manual rate-limit".
// https://docs.bullmq.io/guide/workers/stalled-jobs: a killed worker's jobs come back after about 30 s. The defaults stay.
// https://docs.bullmq.io/guide/jobs/job-ids: a job of an id that exists is not added again.
"use strict";

const { Queue, Worker } = require("bullmq");
const IORedis = require("ioredis");
const { OpenAI } = require("openai");

const NAME = "jobs";
const Redis = IORedis.Redis ?? IORedis;
const rate = Number(process.env.PEER_RATE ?? 0);
const pausing = process.env.PEER_PAUSE === "1";
const connection = () => new Redis(process.env.PEER_REDIS, { maxRetriesPerRequest: null });

function work() {
  const unit = (process.env.PEER_UNIT ?? "0").padStart(4, "0");
  // The queue retries, so the SDK must not.
  const client = new OpenAI({
    baseURL: `${process.env.PEER_PROVIDER}/v1`,
    apiKey: `sk-bench-${unit}`,
    maxRetries: 0,
  });
  const worker = new Worker(
    NAME,
    async (job) => {
      try {
        const messages = [{ role: "user", content: job.data.prompt }];
        const reply = await client.chat.completions.create({ model: "bench", messages, max_completion_tokens: 60 });
        return reply.choices[0].message.content;
      } catch (error) {
        if (!pausing || error.status !== 429) throw error;
        await worker.rateLimit(Number(error.headers.get("retry-after-ms")));
        throw Worker.RateLimitError();
      }
    },
    {
      connection: connection(),
      concurrency: Number(process.env.PEER_THREADS ?? 1),
      ...(rate ? { limiter: { max: 1, duration: Math.round(60000 / rate) } } : {}),
    },
  );
  worker.on("error", (error) => console.error(error));
}

async function submit() {
  const queue = new Queue(NAME, { connection: connection() });
  const add = ([key, prompt]) =>
    queue.add("complete", { prompt }, { jobId: key, attempts: 3, backoff: { type: "exponential", delay: 1000 } });
  for await (const line of require("node:readline").createInterface({ input: process.stdin })) {
    const { jobs = [], threads = 1 } = JSON.parse(line);
    for (let index = 0; index < jobs.length; index += threads) {
      await Promise.all(jobs.slice(index, index + threads).map(add));
    }
    const answer = jobs.length ? { submitted: jobs.length } : await queue.getJobCounts("completed", "failed");
    process.stdout.write(JSON.stringify(answer) + "\n");
  }
  process.exit(0);
}

if (process.argv[2] === "submit") submit();
else work();
