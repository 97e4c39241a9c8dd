// Runs the example page's script without a browser: with Node's own fetch and WebSocket, and stand-ins for its three
// elements. Each connection is cut off after CUT_AFTER frames, CUTS times. Prints what the page shows, as JSON lines.
//
//   node browser.mjs PAGE_JS PAGE_URL PROMPT
import { readFileSync } from "node:fs";
import vm from "node:vm";

const [script, url, prompt] = process.argv.slice(2);
const CUTS = 3;
const CUT_AFTER = 3;
let cuts = 0;

class CutSocket extends WebSocket {
  frames = 0;

  set onmessage(take) {
    super.onmessage = (message) => {
      if (this.readyState !== WebSocket.OPEN) return;
      take(message);
      this.frames += 1;
      if (cuts < CUTS && this.frames === CUT_AFTER) {
        cuts += 1;
        this.close();
      }
    };
  }
}

function element(name) {
  let text = "";
  return {
    get textContent() { return text; },
    set textContent(value) { text = value; console.log(JSON.stringify({ [name]: value })); },
  };
}

let submitted;
const elements = {
  "#status": element("status"),
  "#answer": element("answer"),
  form: { elements: { prompt: { value: prompt } }, addEventListener: (_, listener) => { submitted = listener; } },
};
const page = {
  document: { querySelector: (selector) => elements[selector] },
  fetch: (path, options) => fetch(new URL(path, url), options),
  WebSocket: CutSocket,
  setTimeout, JSON, console,
};
vm.runInNewContext(readFileSync(script, "utf8"), page);
await submitted({ preventDefault() {} });
console.log(JSON.stringify({ cuts }));
