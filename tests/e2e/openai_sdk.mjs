// The official OpenAI SDK for TypeScript against the deployed stack: create, retrieve until done, cancel, delete, error
// classes, webhook. Prints one JSON object of what it saw. The webhook comes on standard input, as {body, headers}.
//
//   node openai_sdk.mjs PACKAGES API_URL API_KEY MODEL PROMPT WEBHOOK_URL SECRET
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";
import { text } from "node:stream/consumers";

const [packages, url, apiKey, model, prompt, webhookUrl, secret] = process.argv.slice(2);
const OpenAI = createRequire(`${packages}/`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries: 3 });
const webhook = { url: webhookUrl, secret };

async function ended(id) {
  for (;;) {
    const response = await client.responses.retrieve(id);
    if (!["queued", "in_progress"].includes(response.status)) return response;
    await sleep(200);
  }
}

async function refusal(attempt) {
  try {
    await attempt();
  } catch (error) {
    return { name: error.constructor.name, status: error.status, code: error.code, param: error.param, id: !!error.requestID };
  }
  return null;
}

const created = await client.responses.create({ model, input: prompt, background: true, webhook });
const done = await ended(created.id);
const waiting = await client.responses.create({ model, input: `slow ${prompt}`, background: true });
const cancelled = await client.responses.cancel(waiting.id);
const missing = await refusal(() => client.responses.retrieve("job_nobody"));
const invalid = await refusal(() => client.responses.create({ model, input: prompt, background: true, tools: [{ type: "web_search" }] }));
const stranger = await refusal(() => new OpenAI({ baseURL: `${url}/v1`, apiKey: "bb_wrong" }).models.list());
const models = (await client.models.list()).data.map((entry) => entry.id);
console.log(JSON.stringify({ created, done, text: done.output_text, cancelled: cancelled.status, missing, invalid, stranger, models }));

const { body, headers } = JSON.parse(await text(process.stdin));
const event = await client.webhooks.unwrap(body, headers, secret);
await client.responses.delete(created.id);
const gone = await refusal(() => client.responses.retrieve(created.id));
console.log(JSON.stringify({ event, gone }));
