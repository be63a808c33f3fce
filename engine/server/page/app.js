// Asks the server for its numbers once a second and hands them to the parts of the page.

import { showAdapters, startAdapters } from "./adapters.js";
import { get } from "./api.js";
import { find, formatShare, make, say } from "./dom.js";
import { showMemory } from "./memory.js";
import { showModels, startPlayground } from "./playground.js";

const INTERVAL_MS = 1000;
const HISTORY = 120;
const [WIDTH, HEIGHT] = [300, 40];

let last = null;
let shownPid = null;
let base = "";
const rates = [];

/** Generated tokens a second since the last answer; 0 across a restart of the engine. */
function tokenRate(numTokens) {
  const now = performance.now();
  const rate = last ? (1000 * (numTokens - last.numTokens)) / (now - last.now) : 0;
  last = { now, numTokens };
  return Math.max(0, rate);
}

function showHistory(rate) {
  rates.push(rate);
  if (rates.length > HISTORY) rates.shift();
  const top = Math.max(1, ...rates);
  const x = (i) => WIDTH - ((rates.length - 1 - i) * WIDTH) / (HISTORY - 1);
  const y = (value) => HEIGHT - 2 - (value / top) * (HEIGHT - 4);
  const points = rates.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`);
  find("history-line").setAttribute("points", points.join(" "));
}

function showNumbers(answer) {
  const { stats } = answer;
  const rate = tokenRate(stats.generated_tokens_total);
  showHistory(rate);
  const numbers = {
    Running: stats.num_running,
    Queued: stats.num_waiting,
    "Tokens/s": rate.toFixed(1),
    "KV in use": formatShare(stats.num_kv_tokens_used, stats.num_kv_tokens),
    "Adapters in memory": `${stats.num_adapters_resident} / ${stats.num_adapter_slots}`,
    "Prefix hits": formatShare(stats.cached_prompt_tokens_total, stats.prompt_tokens_total) || "-",
    Restarts: answer.num_restarts,
  };
  const pairs = Object.entries(numbers).map(([name, value]) =>
    make("div", {}, make("dt", {}, name), make("dd", {}, String(value))),
  );
  find("numbers").replaceChildren(...pairs);
}

function showState(answer) {
  const { info } = answer;
  const state = find("state");
  if (state.textContent !== answer.state) say(state, answer.state);
  state.classList.toggle("ready", answer.state === "ready");
  find("model").textContent = `${base}, ${info.dtype} on ${info.device}`;
}

/** What stays the same as long as the engine process lives. */
async function showEngine(pid) {
  const models = await get("v1/models");
  base = models.data.find((card) => card.parent === null).id;
  await showMemory();
  shownPid = pid;
}

async function refresh() {
  try {
    const answer = await get("v1/stats");
    if (shownPid !== answer.info.pid) await showEngine(answer.info.pid);
    showState(answer);
    showNumbers(answer);
    showAdapters(answer.adapters, answer.stats);
    showModels(base, answer.adapters);
  } catch (error) {
    say(find("state"), error.message, true);
    find("state").classList.remove("ready");
  }
}

/** One request at a time, none while nobody looks. */
async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, INTERVAL_MS);
}

find("keys-form").addEventListener("submit", (event) => event.preventDefault());
startAdapters(refresh);
startPlayground();
poll();
