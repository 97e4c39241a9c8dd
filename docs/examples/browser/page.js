"use strict";

const FINAL = ["completed", "failed", "cancelled", "expired"];
const PAUSE_MS = 500;

/** What has come of an answer. A retry of the job writes another draft of it, from the beginning. */
class Answer {
  draft = 0;
  position = 0; // in characters; a text's length counts some of them twice
  text = "";

  take(frame) {
    if (frame.draft > this.draft) {
      this.draft = frame.draft;
      this.position = 0;
      this.text = "";
    }
    const isNext = frame.draft === this.draft && frame.position <= this.position && this.position < frame.end;
    if (isNext) {
      this.text += [...frame.text].slice(this.position - frame.position).join("");
      this.position = frame.end;
    }
  }
}

/** Ask this page's own server, which has the API key. */
async function ask(path, body) {
  const reply = await fetch(path, { method: "POST", body: JSON.stringify(body ?? {}) });
  if (!reply.ok) throw new Error(`${path}: ${reply.status}`);
  return reply.json();
}

/** One connection's time: the job if it ended meanwhile, null if the connection broke before. */
function listen(ticket, jobId, answer, show) {
  return new Promise((resolve) => {
    const socket = new WebSocket(`${ticket.socket_url}?ticket=${ticket.ticket}`);
    socket.onopen = () => {
      const after = { draft: answer.draft, position: answer.position };
      socket.send(JSON.stringify({ action: "subscribe", job_id: jobId, after }));
    };
    socket.onmessage = (message) => {
      const frame = JSON.parse(message.data);
      if (frame.type === "delta") {
        answer.take(frame);
        show("processing", answer.text);
      } else if (frame.type === "job") {
        show(frame.job.status, answer.text);
        if (FINAL.includes(frame.job.status)) {
          resolve(frame.job);
          socket.close();
        }
      }
    };
    socket.onclose = () => resolve(null);
  });
}

/** Follow a job to its end, over as many connections as that takes; each needs a ticket of its own. */
async function follow(jobId, show) {
  const answer = new Answer();
  for (;;) {
    const ended = await ask("/ticket").then((ticket) => listen(ticket, jobId, answer, show), () => null);
    if (ended) return ended.result_note ? ask("/job", { job_id: jobId }) : ended;
    await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
  }
}

const form = document.querySelector("form");

function show(status, text) {
  document.querySelector("#status").textContent = status;
  document.querySelector("#answer").textContent = text;
}

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  show("…", "");
  try {
    const { job_id: jobId } = await ask("/ask", { prompt: form.elements.prompt.value });
    const job = await follow(jobId, show);
    show(job.status, job.result?.text ?? job.error?.message ?? "");
  } catch (error) {
    show("failed", error.message);
  }
});
