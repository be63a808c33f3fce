// One prompt, answered by several models side by side, as their tokens come.

import { stream } from "./api.js";
import { find, make, say } from "./dom.js";

let running = null;
let shown = "";

/** Check boxes of the base and all adapters; the choice outlives a redraw. */
export function showModels(base, adapters) {
  const names = [base, ...adapters.map((adapter) => adapter.name)];
  const now = JSON.stringify(names);
  if (now === shown) return;
  const chosen = shown ? new Set(chosenModels()) : new Set(names.slice(0, 2));
  shown = now;
  find("models").replaceChildren(
    ...names.map((name) => {
      const box = make("input", { type: "checkbox", value: name, checked: chosen.has(name) });
      return make("label", {}, box, ` ${name}`);
    }),
  );
}

function chosenModels() {
  return [...find("models").querySelectorAll("input:checked")].map((box) => box.value);
}

function requestOf(model) {
  const prompt = find("prompt").value;
  const common = {
    model,
    max_tokens: find("max-tokens").valueAsNumber,
    temperature: find("temperature").valueAsNumber,
    stream_options: { include_usage: true },
  };
  return find("mode").value === "chat"
    ? ["v1/chat/completions", { ...common, messages: [{ role: "user", content: prompt }] }]
    : ["v1/completions", { ...common, prompt }];
}

/** Stream one answer into its own column. */
async function answer(model, signal) {
  const text = make("pre");
  const status = make("p", { className: "quiet" }, "waiting");
  find("answers").append(make("article", { className: "answer" }, make("h3", {}, model), text, status));
  const start = performance.now();
  let first = 0;
  let numTokens = 0;
  let reason = "";
  const progress = () => {
    const seconds = (performance.now() - first) / 1000;
    const rate = numTokens > 1 && seconds > 0 ? `, ${((numTokens - 1) / seconds).toFixed(1)}/s` : "";
    return `first token after ${Math.round(first - start)} ms, ${numTokens} tokens${rate}`;
  };
  try {
    for await (const chunk of stream(...requestOf(model), signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      numTokens = chunk.usage?.completion_tokens ?? numTokens;
      const choice = chunk.choices[0];
      if (!choice) continue;
      const piece = choice.delta ? choice.delta.content : choice.text;
      reason = choice.finish_reason ?? reason;
      if (!piece) continue;
      first ||= performance.now();
      numTokens += 1;
      text.append(piece);
      say(status, progress());
    }
    say(status, first ? `${progress()}, ended by ${reason}` : `no text, ended by ${reason}`);
  } catch (error) {
    say(status, signal.aborted ? "stopped" : error.message, !signal.aborted);
  }
}

async function ask(event) {
  event.preventDefault();
  const models = chosenModels();
  const message = find("ask-message");
  if (!models.length) {
    say(message, "Choose at least one model.", true);
    return;
  }
  say(message, "Streaming.");
  find("answers").replaceChildren();
  running = new AbortController();
  find("ask").disabled = true;
  find("stop").disabled = false;
  await Promise.all(models.map((model) => answer(model, running.signal)));
  find("ask").disabled = false;
  find("stop").disabled = true;
  say(message, "Done.");
}

export function startPlayground() {
  find("ask-form").addEventListener("submit", ask);
  find("stop").addEventListener("click", () => running.abort());
}
